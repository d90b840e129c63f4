#include "tools/cli/plan/plan_request.h"

#include <algorithm>

#include "common/base/narrow.h"
#include "common/plan/plan.h"
#include "common/topology/rank_map.h"
#include "tools/cli/plan/pair_plan.h"

namespace kvferry {
namespace {

/// Collects what is wrong with the options, so that all of it is reported at once.
class Problems {
 public:
  void add(std::string problem) {
    text_ += text_.empty() ? "" : "; ";
    text_ += problem;
  }
  /// The value, or a default one and a problem.
  template <class T>
  T take(std::string_view option, Result<T> result) {
    if (!result) {
      add(fmt::format("{}: {}", option, result.error().message));
      return {};
    }
    return *std::move(result);
  }
  Result<void> result() const {
    if (!text_.empty()) {
      return fail(Code::kInvalid, "{}", text_);
    }
    return {};
  }

 private:
  std::string text_;
};

void check_numbers(const PlanOptions& options, Problems& problems) {
  if (options.tokens < 1 || options.tokens > kPlanTokensMax) {
    problems.add(fmt::format("--tokens is {}, must be 1 to {}", options.tokens, kPlanTokensMax));
  }
  if (options.prefix > options.tokens) {
    problems.add(fmt::format("--prefix is {}, must be at most --tokens {}", options.prefix, options.tokens));
  }
  if (options.explain && *options.explain >= options.tokens) {
    problems.add(fmt::format("--explain names token {}, the request has tokens 0 to {}", *options.explain,
                             options.tokens - 1));
  }
  if (!room_is_legal(options.room)) {
    problems.add(fmt::format("--room is {}, must be 1 to {}", options.room, kRoomMax));
  }
  if (options.decode_pages && *options.decode_pages > kPlanTokensMax) {
    problems.add(
        fmt::format("--decode-pages is {}, must be at most {}", *options.decode_pages, kPlanTokensMax));
  }
}

void check_side(std::string_view option, const ModelGeometry& model, const PlannedSide& side,
                Problems& problems) {
  if (side.dp_rank >= side.topology.dp) {
    problems.add(fmt::format("{}-dp is {}, the layout has DP ranks 0 to {}", option, side.dp_rank,
                             side.topology.dp - 1));
  }
  if (validate(side.topology, model) && side.rank_count() > kPlanRanksMax) {
    problems.add(fmt::format("{} {} has {} ranks in a DP rank, at most {} are planned here", option,
                             to_string(side.topology), side.rank_count(), kPlanRanksMax));
  }
}

/// `count` pages. Scattered: even ids only, so that no page is the physical neighbour of another.
std::vector<std::uint32_t> page_list(std::uint64_t count, bool dense) {
  std::vector<std::uint32_t> pages(count);
  for (std::size_t i = 0; i < pages.size(); ++i) {
    pages[i] = narrow<std::uint32_t>(dense ? i : 2 * i);
  }
  return pages;
}

/// The pages of the sliding window, from the one that its first token lies in.
void add_window(PlannedSide& side, const PlanRequest& request) {
  if (request.model.sliding_layers.empty()) {
    return;
  }
  const std::uint64_t begin = window_of(request.model.sliding_window, {request.prefix, request.tokens}).begin;
  side.window_first = begin - begin % side.virtual_page();
  const std::uint64_t pages =
      (request.tokens - side.window_first + side.virtual_page() - 1) / side.virtual_page();
  side.window_pages = page_list(pages, request.dense);
}

/// What a daemon of this side says of itself in the handshake.
Descriptor describe(Role role, const ModelGeometry& model, const PlannedSide& side) {
  Descriptor out;
  out.role = role;
  out.build = KVF_VERSION;
  out.model.name = model.name;
  out.geometry = model;
  out.page_size = side.page_size;
  out.topology = side.topology;
  out.fabrics.push_back({.kind = "tcp"});
  RankDescription rank;
  // The other ranks' pools follow from the layout in the same way, so one stands for all. A layout that is
  // not legal owns nothing.
  if (validate(side.topology, model)) {
    rank.index = side.first_rank();
    rank.coord = side.topology.coord(rank.index);
    for (const BufferShape& shape : planned_buffers(model, side, rank.index)) {
      rank.buffers.push_back({shape.layer, shape.kind,
                              std::uint64_t{shape.row_bytes} * shape.rows_of_page(side.page_size),
                              shape.pages});
    }
  }
  out.ranks.push_back(std::move(rank));
  return out;
}

}  // namespace

WriteLimits PlanRequest::limits() const {
  WriteLimits out;
  out.blocks = cost.blocks;
  out.puts.slot_bytes = ucx::staging_slot_bytes(cost.staging_bytes);
  return out;
}

Result<PlanRequest> read_request(const PlanOptions& options) {
  Problems problems;
  PlanRequest out;
  out.tokens = options.tokens;
  out.prefix = options.prefix;
  out.room = options.room;
  out.dense = options.dense;
  out.cost = options.cost;
  check_numbers(options, problems);
  out.model = problems.take("--model", load_geometry(options.model));
  out.model.draft_layers = options.draft_layers;
  if (!options.dtype.empty()) {
    out.model.dtype = problems.take("--dtype", parse_dtype(options.dtype));
  }
  out.prefill.topology = problems.take("--prefill", parse_topology(options.prefill));
  out.decode.topology = problems.take("--decode", parse_topology(options.decode_layout(out.model)));
  const auto page_size = [&](std::uint32_t own) { return own == 0 ? options.page_size : own; };
  out.prefill.page_size = page_size(options.prefill_page_size);
  out.decode.page_size = page_size(options.decode_page_size);
  out.prefill.dp_rank = options.prefill_dp;
  out.decode.dp_rank = options.decode_dp;
  if (problems.result()) {
    check_side("--prefill", out.model, out.prefill, problems);
    check_side("--decode", out.model, out.decode, problems);
  }
  KVF_TRY_VOID(problems.result());
  // Prefill computes whole pages, so its list begins with the page that the first moved token lies in.
  // Decode's list begins after the prefix.
  out.prefill.first_token = out.prefix - out.prefix % out.prefill.virtual_page();
  out.decode.first_token = out.prefix;
  out.prefill.pages = page_list(out.prefill.pages_for(out.tokens), out.dense);
  out.decode.pages = page_list(options.decode_pages.value_or(out.decode.pages_for(out.tokens)), out.dense);
  add_window(out.prefill, out);
  add_window(out.decode, out);
  return out;
}

std::vector<Violation> check_request(const PlanRequest& request) {
  std::vector<Violation> out = evaluate(describe(Role::kPrefill, request.model, request.prefill),
                                        describe(Role::kDecode, request.model, request.decode));
  const auto valid = validate_pair(request.model, request.prefill.topology, request.decode.topology);
  if (!valid && !refuses(out)) {
    out.push_back({.rule = "layout",
                   .field = "topology",
                   .prefill = to_string(request.prefill.topology),
                   .decode = to_string(request.decode.topology),
                   .message = valid.error().message,
                   .fix = "correct what the message names"});
  }
  return out;
}

}  // namespace kvferry
