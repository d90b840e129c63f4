#include <catch2/catch.hpp>

#include <algorithm>
#include <numeric>

#include "common/topology/rank_map.h"
#include "tests/support/rng.h"
#include "tests/unit/plan/oracle.h"

namespace kvferry {
namespace {

using test::Rng;

struct World {
  ModelGeometry model;
  Topology prefill;
  Topology decode;
  std::uint32_t prefill_page = 1;
  std::uint32_t decode_page = 1;
};

ModelGeometry random_model(Rng& rng) {
  ModelGeometry model;
  model.name = "random";
  model.dtype = Dtype::kInt8;
  model.hidden_layers = rng.between32(1, 4);
  for (std::uint32_t layer = 0; layer < model.hidden_layers; ++layer) {
    if (rng.chance(3, 4) || (layer + 1 == model.hidden_layers && model.kv_layers.empty())) {
      model.kv_layers.push_back(layer);
    } else if (rng.chance(1, 2)) {
      model.sliding_layers.push_back(layer);
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

/// Physical pages: scattered, consecutive, or stretches of both.
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

/// One request between one decode rank and all prefill ranks.
struct Request {
  std::uint64_t prefix = 0;  // tokens the decode side already has
  std::uint64_t tokens = 0;
  std::uint64_t dst_first = 0;
  Room room = 1;
  std::vector<std::uint64_t> cuts;  // chunk ends, ascending, the last is `tokens`
};

Request random_request(Rng& rng, const World& world) {
  const std::uint64_t src_page = std::uint64_t{world.prefill_page} * world.prefill.dcp;
  const std::uint64_t dst_page = std::uint64_t{world.decode_page} * world.decode.dcp;
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

std::uint64_t pages_for(const Topology& topology, std::uint32_t page_size, std::uint64_t first,
                        std::uint64_t end) {
  const std::uint64_t page_tokens = std::uint64_t{page_size} * topology.dcp;
  return (end - first + page_tokens - 1) / page_tokens;
}

RankShape shape_of(const World& world, bool prefill, const RankCoord& coord, std::uint64_t pages) {
  const Topology& topology = prefill ? world.prefill : world.decode;
  RankShape shape{topology, coord, prefill ? world.prefill_page : world.decode_page, {}};
  for (const BufferKind kind : world.model.buffer_kinds()) {
    for (const std::uint32_t layer : oracle::layers(world.model, topology, coord.pp)) {
      if (oracle::layer_has_kv(world.model, layer)) {
        const auto heads = static_cast<std::uint32_t>(oracle::heads(world.model, topology, coord.tp).size());
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
  std::uint64_t page_tokens = 0;
};

ChunkRequest chunk_of(const Source& source, std::uint64_t begin, std::uint64_t end, bool whole_list,
                      const Request& request, const std::vector<std::uint32_t>& dst_pages) {
  ChunkRequest chunk{
      begin, end, 0, request.dst_first, source.pages, dst_pages, {request.prefix, request.tokens}};
  if (!whole_list) {
    const std::size_t skip = begin / source.page_tokens;
    const std::size_t stop = std::max(skip, (end + source.page_tokens - 1) / source.page_tokens);
    chunk.src_first_token = skip * source.page_tokens;
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

/// Two single runs that continue each other on both sides should have been one.
bool is_compact(const Plan& plan) {
  for (std::size_t i = 1; i < plan.runs.size(); ++i) {
    const RowRun& a = plan.runs[i - 1];
    const RowRun& b = plan.runs[i];
    if (a.count == 1 && b.count == 1 && a.src_row + a.rows == b.src_row && a.dst_row + a.rows == b.dst_row) {
      return false;
    }
  }
  return true;
}

struct Tally {
  std::uint64_t cases = 0;
  std::uint64_t refused_pairs = 0;
  std::uint64_t transfers = 0;
  std::uint64_t runs = 0;
  std::uint64_t strided = 0;
  std::uint64_t spoiled = 0;
};

/// All sources of one destination for one request, against the destination memory the oracle expects.
class Transfer {
 public:
  Transfer(Rng& rng, const World& world, const Request& request, RankIndex decode_rank, Tally& tally)
      : rng_(rng), world_(world), request_(request), tally_(tally) {
    const std::uint64_t count =
        pages_for(world.decode, world.decode_page, request.dst_first, request.tokens) + rng.below(2);
    const std::uint64_t pool_pages = count + rng.between(1, 3);
    dst_ = shape_of(world, false, world.decode.coord(decode_rank), pool_pages);
    dst_pages_ = random_pages(rng, count, pool_pages);
  }

  bool run(const DecodeTargets& targets, std::uint32_t prefill_dp, std::string& why) {
    oracle::Written written(dst_);
    RankCoord coord{0, 0, 0, prefill_dp};
    for (; coord.pp < world_.prefill.pp; ++coord.pp) {
      for (coord.cp = 0; coord.cp < world_.prefill.cp; ++coord.cp) {
        for (coord.tp = 0; coord.tp < world_.prefill.tp; ++coord.tp) {
          if (!send(coord, targets, written, why)) {
            return false;
          }
        }
      }
    }
    const oracle::RankView view(world_.model, dst_, request_.dst_first, request_.tokens, dst_pages_);
    return written.matches(view, request_.prefix, request_.tokens, why);
  }

 private:
  bool send(const RankCoord& coord, const DecodeTargets& targets, oracle::Written& written,
            std::string& why) {
    const RankIndex index = world_.prefill.rank_index(coord);
    const auto in = [index](const std::vector<RankIndex>& ranks) {
      return std::find(ranks.begin(), ranks.end(), index) != ranks.end();
    };
    // Non-targets are only planned now and then; they must have nothing to send.
    if (!in(targets.targets) && !rng_.chance(1, 8)) {
      return true;
    }
    Source source;
    source.page_tokens = std::uint64_t{world_.prefill_page} * world_.prefill.dcp;
    const std::uint64_t count = pages_for(world_.prefill, world_.prefill_page, 0, request_.tokens);
    const std::uint64_t pool_pages = count + rng_.between(1, 3);
    source.shape = shape_of(world_, true, coord, pool_pages);
    source.pages = random_pages(rng_, count, pool_pages);
    const auto layout = pair_layout(world_.model, source.shape, dst_);
    if (!layout) {
      why = "pair refused: " + layout.error().message;
      return false;
    }
    const bool sends = in(targets.targets) && layout->elected(request_.room);
    if (sends != in(targets.sources) || (!in(targets.targets) && !layout->pairs.empty())) {
      why = "rank map and pair layout disagree about rank " + std::to_string(index);
      return false;
    }
    return !sends || plan_and_apply(source, *layout, written, why);
  }

  bool plan_and_apply(const Source& source, const PairLayout& layout, oracle::Written& written,
                      std::string& why) {
    const oracle::RankView view(world_.model, source.shape, 0, request_.tokens, source.pages);
    std::uint64_t begin = request_.prefix;
    for (const std::uint64_t end : request_.cuts) {
      const ChunkRequest chunk = chunk_of(source, begin, end, rng_.chance(1, 3), request_, dst_pages_);
      const auto plan = plan_chunk(layout, chunk);
      if (!plan) {
        why = "chunk refused: " + plan.error().message;
        return false;
      }
      if (layout.src_tokens.same_tokens(layout.dst_tokens) && !is_compact(*plan)) {
        why = "runs that continue each other were not merged";
        return false;
      }
      if (!written.apply(*plan, source.shape, view, why)) {
        return false;
      }
      tally_.runs += plan->runs.size();
      tally_.strided += std::any_of(plan->runs.begin(), plan->runs.end(),
                                    [](const RowRun& run) { return run.src_step != run.dst_step; });
      if (rng_.chance(1, 6) && !source.shape.buffers.empty() && !dst_.buffers.empty()) {
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
  Tally& tally_;
  RankShape dst_;
  std::vector<std::uint32_t> dst_pages_;
};

bool targets_are_inverse(const World& world, const DecodeTargets& targets, RankIndex decode_rank,
                         std::uint32_t prefill_dp) {
  for (RankIndex rank = 0; rank < world.prefill.rank_count(); ++rank) {
    if (world.prefill.coord(rank).dp != prefill_dp) {
      continue;
    }
    const auto destinations = prefill_destinations(world.model, world.prefill, world.decode, rank,
                                                   world.decode.coord(decode_rank).dp);
    const bool forward =
        std::find(targets.targets.begin(), targets.targets.end(), rank) != targets.targets.end();
    const bool backward =
        std::find(destinations.begin(), destinations.end(), decode_rank) != destinations.end();
    if (forward != backward) {
      return false;
    }
  }
  return true;
}

std::string describe(const World& world) {
  return to_string(world.prefill) + " page " + std::to_string(world.prefill_page) + " -> " +
         to_string(world.decode) + " page " + std::to_string(world.decode_page) + ", " +
         std::string(to_string(world.model.attention)) + " heads " + std::to_string(world.model.kv_heads) +
         " layers " + std::to_string(world.model.hidden_layers);
}

bool one_case(Rng& rng, Tally& tally, std::string& why) {
  const World world = random_world(rng);
  ++tally.cases;
  why = describe(world) + ": ";
  std::string reason;
  if (!oracle::pair_is_legal(world.model, world.prefill, world.prefill_page, world.decode,
                             world.decode_page)) {
    ++tally.refused_pairs;
    const auto layout = pair_layout(world.model, {world.prefill, {}, world.prefill_page, {}},
                                    {world.decode, {}, world.decode_page, {}});
    why += "an illegal pair was accepted";
    return !layout && !layout.error().message.empty();
  }
  const auto rank = static_cast<RankIndex>(rng.below(world.decode.rank_count()));
  const auto prefill_dp = static_cast<std::uint32_t>(rng.below(world.prefill.dp));
  const Request request = random_request(rng, world);
  const DecodeTargets targets =
      decode_targets(world.model, world.prefill, world.decode, rank, prefill_dp, request.room);
  if (!targets_are_inverse(world, targets, rank, prefill_dp)) {
    why += "prefill_destinations is not the inverse of decode_targets";
    return false;
  }
  ++tally.transfers;
  Transfer transfer(rng, world, request, rank, tally);
  const bool right = transfer.run(targets, prefill_dp, reason);
  why += "rank " + std::to_string(rank) + ": " + reason;
  return right;
}

}  // namespace

// Claim: over random legal topologies, pages, prefixes and chunks, all elected sources together write every
// byte that a destination rank owns of the request exactly once, from the right coordinate, and touch nothing
// else; what is refused is illegal by the oracle's rules. Method: brute force, byte by byte.
TEST_CASE("every destination byte is written once, from the right coordinate, and no other byte is touched") {
  const std::uint64_t seed = test::test_seed(20260829);
  std::printf("plan property test: KVF_SEED=%llu\n", static_cast<unsigned long long>(seed));
  Tally tally;
  for (std::uint64_t i = 0; i < 60000; ++i) {
    Rng rng(seed + i);
    std::string why;
    if (!one_case(rng, tally, why)) {
      FAIL("KVF_SEED=" << seed + i << " (case " << i << " of " << seed << "): " << why);
    }
  }
  std::printf(
      "plan property test: %llu cases, %llu pairs refused, %llu transfers, %llu runs, %llu strided plans, "
      "%llu spoiled chunks\n",
      static_cast<unsigned long long>(tally.cases), static_cast<unsigned long long>(tally.refused_pairs),
      static_cast<unsigned long long>(tally.transfers), static_cast<unsigned long long>(tally.runs),
      static_cast<unsigned long long>(tally.strided), static_cast<unsigned long long>(tally.spoiled));
  CHECK(tally.transfers >= 20000);
  CHECK(tally.refused_pairs >= 2000);
  CHECK(tally.strided >= 5000);
  CHECK(tally.spoiled >= 5000);
}

}  // namespace kvferry
