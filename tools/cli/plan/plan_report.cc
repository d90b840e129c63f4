#include "tools/cli/plan/plan_report.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <utility>

#include "common/base/hash.h"
#include "tools/cli/plan/pair_plan.h"
#include "tools/cli/plan/row_tokens.h"

namespace kvferry {
namespace {

using RankPair = std::pair<RankIndex, RankIndex>;  // prefill, decode

/// Who sends to whom for this room, ascending.
std::vector<RankPair> sending_pairs(const PlanRequest& request) {
  std::vector<RankPair> pairs;
  if (request.prefix == request.tokens && request.model.state_layers.empty()) {
    return pairs;
  }
  const PlannedSide& decode = request.decode;
  for (RankIndex rank = decode.first_rank(); rank < decode.first_rank() + decode.rank_count(); ++rank) {
    const DecodeTargets targets = decode_targets(request.model, request.prefill.topology, decode.topology,
                                                 rank, request.prefill.dp_rank, request.room);
    for (const RankIndex source : targets.sources) {
      pairs.emplace_back(source, rank);
    }
  }
  std::sort(pairs.begin(), pairs.end());
  return pairs;
}

/// Refusals of the planner. Many pairs are refused for the same reason; it is listed once, with its ranks.
class Refusals {
 public:
  void add(const RankPair& pair, const Error& error) {
    auto& [prefill, decode] = ranks_[error.message];
    if (prefill.empty()) {
      order_.push_back(error);
    }
    prefill.insert(pair.first);
    decode.insert(pair.second);
  }
  bool empty() const { return order_.empty(); }
  void append_to(const PlanRequest& request, std::vector<Violation>& findings) const {
    for (const Error& error : order_) {
      const auto& [prefill, decode] = ranks_.at(error.message);
      const std::string from = ranks_text({prefill.begin(), prefill.end()});
      const std::string into = ranks_text({decode.begin(), decode.end()});
      findings.push_back({.rule = "plan",
                          .field = "pages",
                          .prefill = from,
                          .decode = into,
                          .message = fmt::format("prefill {} to decode {}: {}", from, into, error.message),
                          .fix = fix_of(request, error)});
    }
  }

 private:
  /// In the words of the command: the message speaks to whoever calls the planner.
  static std::string fix_of(const PlanRequest& request, const Error& error) {
    const std::uint64_t virtual_page = request.decode.virtual_page();
    if (error.code != Code::kInvalid) {
      return "correct what the message names";
    }
    if (request.prefix % virtual_page != 0) {
      return fmt::format("let --prefix be a multiple of {}, such as {}", virtual_page,
                         request.prefix - request.prefix % virtual_page);
    }
    return fmt::format("give each decode rank {} pages (--decode-pages)",
                       request.decode.pages_for(request.tokens));
  }

  std::vector<Error> order_;
  std::map<std::string, std::pair<std::set<RankIndex>, std::set<RankIndex>>> ranks_;
};

/// Puts one plan into the hash: a form of its own that no change of a struct's memory layout can change.
void add_plan(Hash64& hash, const RankPair& pair, const Plan& plan) {
  hash.add(std::array<std::uint64_t, 4>{pair.first, pair.second, plan.runs.size(), plan.pairs.size()});
  for (const RowRun& run : plan.runs) {
    hash.add(std::array<std::uint64_t, 7>{run.src_row, run.dst_row, run.dst_index, run.rows, run.count,
                                          run.src_step, run.dst_step});
  }
  for (const BufferPair& buffers : plan.pairs) {
    hash.add(std::array<std::uint64_t, 7>{buffers.src_buffer, buffers.dst_buffer, buffers.src_row_bytes,
                                          buffers.dst_row_bytes, buffers.src_offset, buffers.dst_offset,
                                          buffers.bytes});
  }
}

std::uint64_t writes_of(const std::string& fabric, const WriteCount& writes) {
  return fabric == "shm" ? writes.copies : fabric == "tcp" ? writes.blocks : writes.puts;
}

PlanFigures figures_of(const Plan& plan, const PlanRequest& request) {
  PlanFigures out;
  out.bytes = plan.bytes;
  out.rows = plan.rows;
  out.runs = plan.runs.size();
  out.naive_writes = plan.rows * plan.pairs.size();
  out.writes = count_writes(plan, request.limits());
  out.posted = writes_of(request.cost.fabric, out.writes);
  out.staging_bytes = std::min(out.writes.packed_bytes, request.cost.staging_bytes);
  out.seconds = static_cast<double>(out.bytes) / (request.cost.gigabytes_per_second * 1e9) +
                static_cast<double>(out.posted) * request.cost.write_us * 1e-6;
  return out;
}

void add(PlanFigures& sum, const PlanFigures& part) {
  sum.bytes += part.bytes;
  sum.rows += part.rows;
  sum.runs += part.runs;
  sum.naive_writes += part.naive_writes;
  sum.writes.copies += part.writes.copies;
  sum.writes.blocks += part.writes.blocks;
  sum.writes.puts += part.writes.puts;
  sum.writes.packed_bytes += part.writes.packed_bytes;
  sum.posted += part.posted;
  sum.staging_bytes = std::max(sum.staging_bytes, part.staging_bytes);
  sum.seconds += part.seconds;
}

PairRuns runs_of(const PlanRequest& request, const RankPair& pair, const PartPlan& part,
                 std::uint64_t limit) {
  const Plan& plan = part.plan;
  PairRuns out{pair.first, pair.second, part.space, plan.runs.size(), {}};
  const PlannedSide& decode = request.decode;
  TokenClass owned;  // of drafts and state: every row
  std::uint64_t origin = part.space == RowSpace::kDraft ? decode.first_token : 0;
  if (part.space == RowSpace::kTokens || part.space == RowSpace::kWindow) {
    owned = ownership(decode.topology, request.model, decode.topology.coord(pair.second)).tokens;
    origin = owned.owned_before(part.space == RowSpace::kWindow ? decode.window_first : decode.first_token);
  }
  for (const RowRun& run : plan.runs) {
    if (limit != 0 && out.shown.size() == limit) {
      break;
    }
    const std::uint64_t last = run.dst_index + std::uint64_t{run.count - 1} * run.dst_step + run.rows - 1;
    out.shown.push_back(
        {token_of_row(owned, origin + run.dst_index), token_of_row(owned, origin + last), run});
  }
  return out;
}

void sum_up(PlanReport& report) {
  std::map<RankIndex, SourceReport> sources;
  for (const PairReport& pair : report.pairs) {
    SourceReport& source = sources[pair.prefill];
    source.rank = pair.prefill;
    ++source.destinations;
    add(source.figures, pair.figures);
    add(report.total, pair.figures);
  }
  std::uint64_t busiest = 0;
  for (const auto& [rank, source] : sources) {
    report.sources.push_back(source);
    busiest = std::max(busiest, source.figures.bytes);
    report.seconds = std::max(report.seconds, source.figures.seconds);
  }
  if (report.total.bytes > 0) {
    report.balance = static_cast<double>(busiest) * static_cast<double>(sources.size()) /
                     static_cast<double>(report.total.bytes);
  }
}

void note_decode_tokens(PlanReport& report) {
  const PlannedSide& decode = report.request.decode;
  for (RankIndex rank = decode.first_rank(); rank < decode.first_rank() + decode.rank_count(); ++rank) {
    const TokenClass owned =
        ownership(decode.topology, report.request.model, decode.topology.coord(rank)).tokens;
    report.decode_tokens.push_back(
        {rank, owned.owned_before(report.request.tokens) - owned.owned_before(report.request.prefix)});
  }
}

void plan_all(const PlanOptions& options, PlanReport& report) {
  const PlanRequest& request = report.request;
  note_decode_tokens(report);
  Refusals refusals;
  Hash64 hash;
  hash.add("kvferry plan 1");
  for (const RankPair& pair : sending_pairs(request)) {
    const auto parts = plan_pair(request, pair.first, pair.second, {request.prefix, request.tokens});
    if (!parts) {
      refusals.add(pair, parts.error());
      continue;
    }
    PairReport figures{pair.first, pair.second, 0, {}};
    for (const PartPlan& part : *parts) {
      if (!part.elected || !refusals.empty()) {
        continue;
      }
      add_plan(hash, pair, part.plan);
      figures.buffers += static_cast<std::uint32_t>(part.plan.pairs.size());
      add(figures.figures, figures_of(part.plan, request));
      if (options.pages) {
        report.runs.push_back(runs_of(request, pair, part, options.limit));
      }
    }
    if (figures.buffers > 0) {
      report.pairs.push_back(std::move(figures));
    }
  }
  report.hash = hash.value();
  sum_up(report);
  if (refusals.empty() && options.explain) {
    auto explanation = explain(request, *options.explain);
    if (explanation) {
      report.explanation = *std::move(explanation);
    } else {
      refusals.add({request.prefill.first_rank(), request.decode.first_rank()}, explanation.error());
    }
  }
  refusals.append_to(request, report.findings);
}

}  // namespace

Result<PlanReport> make_report(const PlanOptions& options) {
  PlanReport report;
  KVF_TRY(report.request, read_request(options));
  report.findings = check_request(report.request);
  if (report.supported()) {
    plan_all(options, report);
  }
  return report;
}

std::string ranks_text(const std::vector<RankIndex>& ranks) {
  constexpr std::uint32_t kStretchesMax = 8;  // so that they fit one line
  std::string list;
  std::uint32_t stretches = 0;
  for (std::size_t i = 0; i < ranks.size();) {
    if (++stretches > kStretchesMax) {
      list += fmt::format(",... ({} in all)", ranks.size());
      break;
    }
    std::size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) {
      ++last;
    }
    list += list.empty() ? "" : ",";
    list += last == i ? fmt::format("{}", ranks[i]) : fmt::format("{}-{}", ranks[i], ranks[last]);
    i = last + 1;
  }
  return (ranks.size() == 1 ? "rank " : "ranks ") + list;
}

}  // namespace kvferry
