#include "tests/unit/plan/plan_world.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>

#include "common/topology/rank_map.h"
#include "tests/unit/plan/oracle.h"

namespace kvferry::test {
namespace {

ModelGeometry random_model(Rng& rng) {
  ModelGeometry model;
  model.name = "random";
  model.dtype = Dtype::kInt8;
  model.hidden_layers = rng.between32(1, 4);
  for (std::uint32_t layer = 0; layer < model.hidden_layers; ++layer) {
    if (rng.chance(3, 4) || (layer + 1 == model.hidden_layers && model.kv_layers.empty())) {
      model.kv_layers.push_back(layer);
    }
  }
  if (rng.chance(1, 2)) {
    model.attention = AttentionKind::kMla;
    model.kv_heads = 1;
    model.latent_dim = rng.between32(1, 2);
    model.rope_dim = rng.between32(0, 1);
  } else {
    model.kv_heads = rng.chance(3, 4) ? 1u << rng.between32(0, 4) : rng.between32(1, 16);
    model.head_dim = rng.between32(1, 2);
    model.v_head_dim = rng.between32(1, 2);
  }
  return model;
}

std::uint64_t pages_for(std::uint64_t first, std::uint64_t end, std::uint64_t virtual_page) {
  return (end - first + virtual_page - 1) / virtual_page;
}

RankShape shape_of(const World& world, bool prefill, const RankCoord& coord, std::uint64_t pages) {
  const Topology& topology = prefill ? world.prefill : world.decode;
  RankShape shape{topology, coord, prefill ? world.prefill_page : world.decode_page, {}};
  const auto heads = static_cast<std::uint32_t>(oracle::heads(world.model, topology, coord.tp).size());
  const std::vector<std::uint32_t> layers = oracle::layers(world.model, topology, coord.pp);
  for (const BufferKind kind : world.model.buffer_kinds()) {
    for (const std::uint32_t layer : layers) {
      if (oracle::layer_has_kv(world.model, layer)) {
        shape.buffers.push_back({layer, kind, heads * world.model.head_bytes(kind), pages});
      }
    }
  }
  return shape;
}

/// A prefill rank with the pages of one request.
struct Source {
  RankShape shape;
  std::vector<std::uint32_t> pages;  // of the whole request, from token 0
};

ChunkRequest chunk_of(const World& world, const Source& source, const Interval& tokens, bool whole_list,
                      const Request& request, const std::vector<std::uint32_t>& dst_pages) {
  ChunkRequest chunk{tokens.begin,
                     tokens.end,
                     0,
                     request.dst_first,
                     source.pages,
                     dst_pages,
                     {request.prefix, request.tokens}};
  if (!whole_list) {
    const std::uint64_t page_tokens = world.prefill_virtual_page();
    const std::size_t skip = tokens.begin / page_tokens;
    const std::size_t stop = std::max(skip, (tokens.end + page_tokens - 1) / page_tokens);
    chunk.src_first_token = skip * page_tokens;
    chunk.src_pages = std::span(source.pages).subspan(std::min(skip, source.pages.size()), stop - skip);
  }
  return chunk;
}

/// The oracle's own judgement of one chunk.
bool chunk_is_legal(const RankShape& src, const RankShape& dst, const ChunkRequest& chunk, bool has_pairs) {
  if (chunk.begin > chunk.end || chunk.src_first_token > chunk.begin || chunk.dst_first_token > chunk.begin ||
      chunk.src_first_token % (src.page_size * src.topology.dcp) != 0 ||
      chunk.dst_first_token % (dst.page_size * dst.topology.dcp) != 0) {
    return false;
  }
  const bool splits = src.topology.cp > 1 && src.topology.cp_split != CpSplit::kNone;
  if (splits && (chunk.begin < chunk.request.begin || chunk.end > chunk.request.end)) {
    return false;
  }
  const auto listed = [](const RankShape& shape, std::uint64_t first, std::uint64_t token,
                         std::span<const std::uint32_t> pages) {
    const std::uint64_t index =
        oracle::owned_in(shape.topology, shape.coord.tp, first, token) / shape.page_size;
    return index < pages.size() && pages[index] < shape.buffers[0].pages;
  };
  for (std::uint64_t token = chunk.begin; has_pairs && token < chunk.end; ++token) {
    if (splits && oracle::cp_sender(src.topology, src.page_size, chunk.request.begin, chunk.request.end,
                                    token) != src.coord.cp) {
      continue;
    }
    if (oracle::owns_token(src.topology, src.coord.tp, token) &&
        oracle::owns_token(dst.topology, dst.coord.tp, token) &&
        (!listed(src, chunk.src_first_token, token, chunk.src_pages) ||
         !listed(dst, chunk.dst_first_token, token, chunk.dst_pages))) {
      return false;
    }
  }
  return true;
}

/// Breaks a copy of `chunk` in one way, and checks that the planner and the oracle agree about it.
bool spoiled_chunk_agrees(Rng& rng, const PairLayout& layout, const RankShape& src, const RankShape& dst,
                          ChunkRequest chunk) {
  std::vector<std::uint32_t> src_pages(chunk.src_pages.begin(), chunk.src_pages.end());
  std::vector<std::uint32_t> dst_pages(chunk.dst_pages.begin(), chunk.dst_pages.end());
  auto& pages = rng.chance(1, 2) ? src_pages : dst_pages;
  switch (rng.below(5)) {
    case 0:
      pages.resize(rng.below(pages.size() + 1));
      break;
    case 1:
      if (!pages.empty()) {
        pages[rng.below(pages.size())] = rng.chance(1, 2) ? 0xFFFFFFFFu : 100;
      }
      break;
    case 2:
      (rng.chance(1, 2) ? chunk.src_first_token : chunk.dst_first_token) += rng.between(1, 3);
      break;
    case 3:
      chunk.end += rng.between(1, 40);
      break;
    case 4:
      std::swap(chunk.begin, chunk.end);
      break;
  }
  chunk.src_pages = src_pages;
  chunk.dst_pages = dst_pages;
  const auto plan = plan_chunk(layout, chunk);
  return plan.has_value() == chunk_is_legal(src, dst, chunk, !layout.pairs.empty()) &&
         (plan || !plan.error().message.empty());
}

/// Two single runs that continue each other in both pools and in the page list should have been one.
bool is_compact(const Plan& plan) {
  for (std::size_t i = 1; i < plan.runs.size(); ++i) {
    const RowRun& a = plan.runs[i - 1];
    const RowRun& b = plan.runs[i];
    if (a.count == 1 && b.count == 1 && a.src_row + a.rows == b.src_row && a.dst_row + a.rows == b.dst_row &&
        a.dst_index + a.rows == b.dst_index) {
      return false;
    }
  }
  return true;
}

/// Every row of `run` lies where its index into the granted pages says.
bool index_is_right(const RowRun& run, std::span<const std::uint32_t> pages, std::uint64_t page_size) {
  for (std::uint64_t piece = 0; piece < run.count; ++piece) {
    for (std::uint64_t row = 0; row < run.rows; ++row) {
      const std::uint64_t index = run.dst_index + piece * run.dst_step + row;
      if (index / page_size >= pages.size() || pages[index / page_size] * page_size + index % page_size !=
                                                   run.dst_row + piece * run.dst_step + row) {
        return false;
      }
    }
  }
  return true;
}

bool runs_are_right(const PairLayout& layout, const ChunkRequest& chunk, const Plan& plan, std::string& why) {
  const TokenClass& src = layout.src_tokens;
  const TokenClass& dst = layout.dst_tokens;
  if (src.same_tokens(dst) && !is_compact(plan)) {
    why = "runs that continue each other were not merged";
    return false;
  }
  const bool ascends = src.count == 1 || dst.count == 1 || src.interleave == dst.interleave;
  for (std::size_t i = 0; i < plan.runs.size(); ++i) {
    const RowRun& run = plan.runs[i];
    if (run.rows == 0 || run.count == 0 || run.src_step < run.rows || run.dst_step < run.rows ||
        (run.count == 1 && (run.src_step != run.rows || run.dst_step != run.rows))) {
      why =
          fmt::format("run {} is empty, overlaps itself, or is single and has other steps than its rows", i);
      return false;
    }
    if (!index_is_right(run, chunk.dst_pages, layout.dst_page_size)) {
      why = fmt::format("run {}: dst_index {} and dst_row {} are different rows", i, run.dst_index,
                        run.dst_row);
      return false;
    }
    if (ascends && i > 0 && run.dst_index <= plan.runs[i - 1].dst_index) {
      why = fmt::format("run {}: dst_index {} does not ascend", i, run.dst_index);
      return false;
    }
  }
  return true;
}

/// All sources of one destination for one request, against the destination memory the oracle expects.
class Transfer {
 public:
  Transfer(Rng& rng, const World& world, const Request& request, const Effort& effort, Tally& tally)
      : rng_(rng), world_(world), request_(request), effort_(effort), tally_(tally) {}

  bool run(const DecodeTargets& targets, const Route& route, std::string& why) {
    const std::uint64_t count =
        pages_for(request_.dst_first, request_.tokens, world_.decode_virtual_page()) + rng_.below(2);
    const std::uint64_t pool_pages = count + rng_.between(1, 3);
    dst_ = shape_of(world_, false, world_.decode.coord(route.decode_rank), pool_pages);
    dst_pages_ = random_pages(rng_, count, pool_pages);
    oracle::Written written(dst_);
    const RankIndex ranks = world_.prefill.rank_count() / world_.prefill.dp;
    for (RankIndex index = route.prefill_dp * ranks; index < (route.prefill_dp + 1) * ranks; ++index) {
      if (!send(index, targets, written, why)) {
        return false;
      }
    }
    const oracle::RankView view(world_.model, dst_, request_.dst_first, request_.tokens, dst_pages_);
    return written.matches(view, request_.prefix, request_.tokens, why);
  }

 private:
  bool send(RankIndex index, const DecodeTargets& targets, oracle::Written& written, std::string& why) {
    const auto in = [index](const std::vector<RankIndex>& ranks) {
      return std::find(ranks.begin(), ranks.end(), index) != ranks.end();
    };
    const bool is_target = in(targets.targets);
    if (!is_target && !effort_.all_ranks && !rng_.chance(1, 8)) {
      return true;
    }
    Source source;
    const std::uint64_t count = pages_for(0, request_.tokens, world_.prefill_virtual_page());
    const std::uint64_t pool_pages = count + rng_.between(1, 3);
    source.shape = shape_of(world_, true, world_.prefill.coord(index), pool_pages);
    const auto layout = pair_layout(world_.model, source.shape, dst_);
    if (!layout) {
      why = "pair refused: " + layout.error().message;
      return false;
    }
    const bool sends = is_target && layout->elected(request_.room);
    if (sends != in(targets.sources) || (!is_target && !layout->pairs.empty())) {
      why = fmt::format("rank map and pair layout disagree about rank {}", index);
      return false;
    }
    if (!sends) {
      return true;
    }
    source.pages = random_pages(rng_, count, pool_pages);
    return plan_and_apply(source, *layout, written, why);
  }

  bool plan_and_apply(const Source& source, const PairLayout& layout, oracle::Written& written,
                      std::string& why) {
    const oracle::RankView view(world_.model, source.shape, 0, request_.tokens, source.pages);
    std::uint64_t begin = request_.prefix;
    for (const std::uint64_t end : request_.cuts) {
      const ChunkRequest chunk =
          chunk_of(world_, source, {begin, end}, rng_.chance(1, 3), request_, dst_pages_);
      const auto plan = plan_chunk(layout, chunk);
      if (!plan) {
        why = "chunk refused: " + plan.error().message;
        return false;
      }
      if (!runs_are_right(layout, chunk, *plan, why) || !written.apply(*plan, source.shape, view, why)) {
        return false;
      }
      ++tally_.chunks;
      tally_.runs += plan->runs.size();
      tally_.strided += std::any_of(plan->runs.begin(), plan->runs.end(),
                                    [](const RowRun& run) { return run.src_step != run.dst_step; });
      if (effort_.spoil && rng_.chance(1, 6) && !source.shape.buffers.empty() && !dst_.buffers.empty()) {
        ++tally_.spoiled;
        if (!spoiled_chunk_agrees(rng_, layout, source.shape, dst_, chunk)) {
          why = "planner and oracle disagree about a spoiled chunk";
          return false;
        }
      }
      begin = end;
    }
    return true;
  }

  Rng& rng_;
  const World& world_;
  const Request& request_;
  const Effort& effort_;
  Tally& tally_;
  RankShape dst_;
  std::vector<std::uint32_t> dst_pages_;
};

/// Nobody is named twice, only targets send, as many answer as send, and the aux row has one sender: the
/// lowest source of the last stage.
bool targets_are_sound(const World& world, const DecodeTargets& targets) {
  const auto ascend = [](const std::vector<RankIndex>& ranks) {
    return std::adjacent_find(ranks.begin(), ranks.end(), std::greater_equal<>()) == ranks.end();
  };
  if (targets.sources.empty() || !ascend(targets.targets) || !ascend(targets.sources) ||
      !std::includes(targets.targets.begin(), targets.targets.end(), targets.sources.begin(),
                     targets.sources.end()) ||
      targets.required_prefill_response_num != targets.sources.size()) {
    return false;
  }
  const auto stage = [&world](RankIndex rank) { return world.prefill.coord(rank).pp; };
  return targets.aux_source ==
         *std::max_element(targets.sources.begin(), targets.sources.end(),
                           [&stage](RankIndex a, RankIndex b) { return stage(a) < stage(b); });
}

/// prefill_destinations() names the destination for exactly the ranks that decode_targets() names.
bool targets_are_inverse(Rng& rng, const World& world, const DecodeTargets& targets, const Route& route,
                         const Effort& effort) {
  const RankIndex ranks = world.prefill.rank_count() / world.prefill.dp;
  const std::uint32_t decode_dp = world.decode.coord(route.decode_rank).dp;
  for (RankIndex rank = route.prefill_dp * ranks; rank < (route.prefill_dp + 1) * ranks; ++rank) {
    const bool forward = std::binary_search(targets.targets.begin(), targets.targets.end(), rank);
    if (!forward && !effort.all_ranks && !rng.chance(1, 8)) {
      continue;
    }
    const auto destinations = prefill_destinations(world.model, world.prefill, world.decode, rank, decode_dp);
    const bool backward =
        std::find(destinations.begin(), destinations.end(), route.decode_rank) != destinations.end();
    if (forward != backward ||
        (rank == targets.aux_source && destinations.size() != targets.required_dst_info_num)) {
      return false;
    }
  }
  return true;
}

}  // namespace

bool long_mode() {
  const char* text = std::getenv("KVF_LONG");
  return text != nullptr && std::string_view(text) == "1";
}

Topology random_topology(Rng& rng, const ModelGeometry& model) {
  Topology topology;
  topology.tp = rng.chance(3, 4) ? 1u << rng.between32(0, 4) : rng.between32(1, 12);
  if (rng.chance(1, 2)) {
    topology.dcp = rng.chance(5, 6) ? std::gcd(topology.tp, 1u << rng.between32(0, 3)) : rng.between32(1, 6);
    topology.dcp_interleave = rng.chance(3, 4) ? 1 : rng.between32(1, 4);
  }
  topology.pp = rng.chance(1, 2) ? 1 : rng.between32(1, std::min(3u, model.hidden_layers + 1));
  if (topology.pp > 1 && topology.pp <= model.hidden_layers && rng.chance(1, 2)) {
    topology.pp_layers.assign(topology.pp, 1);
    for (std::uint32_t left = model.hidden_layers - topology.pp; left > 0; --left) {
      ++topology.pp_layers[rng.below(topology.pp)];
    }
  }
  topology.dp = rng.between32(1, 2);
  if (rng.chance(1, 4)) {
    topology.cp = rng.between32(2, 4);
    topology.cp_split = static_cast<CpSplit>(rng.below(3));
  }
  return topology;
}

std::vector<std::uint32_t> random_pages(Rng& rng, std::uint64_t count, std::uint64_t pool_pages) {
  std::vector<std::uint32_t> pages(pool_pages);
  std::iota(pages.begin(), pages.end(), 0u);
  if (rng.chance(1, 2)) {
    rng.shuffle(pages);
  } else {
    std::rotate(pages.begin(), pages.begin() + static_cast<std::ptrdiff_t>(rng.below(pool_pages)),
                pages.end());
  }
  pages.resize(count);
  return pages;
}

World random_world(Rng& rng) {
  World world;
  world.model = random_model(rng);
  world.prefill = random_topology(rng, world.model);
  world.decode = random_topology(rng, world.model);
  if (rng.chance(1, 2)) {
    world.decode.pp = 1;
    world.decode.pp_layers.clear();
  }
  if (rng.chance(1, 2)) {
    world.prefill.dcp = 1;
  }
  if (rng.chance(7, 8)) {
    world.decode.cp_split = CpSplit::kNone;
  }
  world.prefill_page = rng.between32(1, 8);
  world.decode_page = rng.chance(4, 5) ? world.prefill_page : rng.between32(1, 4);
  if (rng.chance(1, 30)) {  // one field far out of range
    std::uint32_t Topology::*const fields[] = {&Topology::tp, &Topology::pp,  &Topology::dp,
                                               &Topology::cp, &Topology::dcp, &Topology::dcp_interleave};
    (rng.chance(1, 2) ? world.prefill : world.decode).*fields[rng.below(6)] = 0;
  }
  return world;
}

std::string describe(const World& world) {
  return fmt::format("{} page {} -> {} page {}, {} heads {} layers {}", to_string(world.prefill),
                     world.prefill_page, to_string(world.decode), world.decode_page,
                     to_string(world.model.attention), world.model.kv_heads, world.model.hidden_layers);
}

bool refusals_agree(const World& world, bool& legal, std::string& why) {
  const auto judge = [&world](std::uint32_t prefill_page, std::uint32_t decode_page) {
    return oracle::pair_is_legal(world.model, world.prefill, prefill_page, world.decode, decode_page);
  };
  legal = judge(world.prefill_page, world.decode_page);
  // validate_pair() knows no page sizes; a page of one interleave always fits.
  const bool maps =
      legal || judge(std::max(1u, world.prefill.dcp_interleave), std::max(1u, world.decode.dcp_interleave));
  const auto valid = validate_pair(world.model, world.prefill, world.decode);
  const auto no_buffers = [](const Topology& topology, std::uint32_t page) {
    return RankShape{topology, {}, page, {}};
  };
  const auto layout =
      legal ? pair_layout(world.model, shape_of(world, true, {}, 1), shape_of(world, false, {}, 1))
            : pair_layout(world.model, no_buffers(world.prefill, world.prefill_page),
                          no_buffers(world.decode, world.decode_page));
  if (valid.has_value() != maps || layout.has_value() != legal) {
    why =
        fmt::format("the oracle calls it {}; validate_pair: {}; pair_layout: {}", legal ? "legal" : "illegal",
                    valid ? "accepted" : valid.error().message, layout ? "accepted" : layout.error().message);
    return false;
  }
  if ((!valid && valid.error().message.empty()) || (!layout && layout.error().message.empty())) {
    why = "refused without a reason";
    return false;
  }
  return true;
}

Request random_request(Rng& rng, const World& world) {
  const std::uint64_t src_page = world.prefill_virtual_page();
  const std::uint64_t dst_page = world.decode_virtual_page();
  Request request;
  request.room = rng.between(1, kRoomMax);
  request.prefix = rng.chance(1, 3) ? dst_page * rng.between(1, 2) : 0;
  request.dst_first = rng.chance(1, 2) ? request.prefix : rng.below(request.prefix / dst_page + 1) * dst_page;
  request.tokens = request.prefix + (rng.chance(1, 20) ? 0 : rng.between(1, 48));
  for (std::uint64_t at = request.prefix; at < request.tokens;) {
    at = rng.chance(1, 5) ? at + rng.between(1, 8) : (at / src_page + rng.between(1, 6)) * src_page;
    request.cuts.push_back(std::min(at, request.tokens));
  }
  if (request.cuts.empty()) {
    request.cuts.push_back(request.tokens);  // full prefix hit: one chunk without tokens
  }
  return request;
}

std::string Tally::to_string() const {
  return fmt::format(
      "{} cases, {} refused, {} transfers, {} chunks, {} runs, {} strided plans, {} spoiled chunks", cases,
      refused, transfers, chunks, runs, strided, spoiled);
}

bool transfer_is_right(Rng& rng, const World& world, const Request& request, const Route& route,
                       const Effort& effort, Tally& tally, std::string& why) {
  const DecodeTargets targets = decode_targets(world.model, world.prefill, world.decode, route.decode_rank,
                                               route.prefill_dp, request.room);
  if (!targets_are_sound(world, targets)) {
    why = "decode_targets contradicts itself";
    return false;
  }
  if (!targets_are_inverse(rng, world, targets, route, effort)) {
    why = "prefill_destinations is not the inverse of decode_targets";
    return false;
  }
  ++tally.transfers;
  return Transfer(rng, world, request, effort, tally).run(targets, route, why);
}

}  // namespace kvferry::test
