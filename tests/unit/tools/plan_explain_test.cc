#include <algorithm>
#include <array>
#include <map>
#include <set>

#include <catch2/catch.hpp>

#include "tests/support/rng.h"
#include "tools/cli/plan/plan_report.h"

using namespace kvferry;
using namespace kvferry::test;

namespace {

/// A model small enough to count everything.
ModelGeometry small_model(bool mla) {
  ModelGeometry model;
  model.name = "small";
  model.attention = mla ? AttentionKind::kMla : AttentionKind::kMha;
  model.hidden_layers = 4;
  model.kv_layers = {0, 1, 2, 3};
  model.kv_heads = mla ? 1 : 4;
  model.head_dim = mla ? 0 : 3;
  model.v_head_dim = mla ? 0 : 2;
  model.latent_dim = mla ? 4 : 0;
  model.rope_dim = mla ? 1 : 0;
  model.hidden_size = 16;
  return model;
}

/// What one rank holds, counted token by token and head by head, without common/topology's arithmetic.
struct Counted {
  const PlanRequest& request;
  const PlannedSide& side;

  RankCoord coord(RankIndex rank) const {
    RankIndex index = 0;
    for (std::uint32_t dp = 0; dp < side.topology.dp; ++dp) {
      for (std::uint32_t pp = 0; pp < side.topology.pp; ++pp) {
        for (std::uint32_t cp = 0; cp < side.topology.cp; ++cp) {
          for (std::uint32_t tp = 0; tp < side.topology.tp; ++tp) {
            if (index++ == rank) {
              return {tp, pp, cp, dp};
            }
          }
        }
      }
    }
    FAIL("no such rank");
    return {};
  }
  bool owns(RankIndex rank, std::uint64_t token) const {
    std::uint64_t owner = 0;
    for (std::uint64_t t = 0; t < token; ++t) {
      owner = (t + 1) % side.topology.dcp_interleave == 0 ? (owner + 1) % side.topology.dcp : owner;
    }
    return owner == coord(rank).tp % side.topology.dcp;
  }
  std::uint64_t rows_before(RankIndex rank, std::uint64_t token) const {
    std::uint64_t rows = 0;
    for (std::uint64_t t = side.first_token; t < token; ++t) {
      rows += owns(rank, t) ? 1 : 0;
    }
    return rows;
  }
  /// Heads in the order of the row.
  std::vector<std::uint64_t> heads(RankIndex rank) const {
    const std::uint64_t groups = side.topology.tp / side.topology.dcp;
    const std::uint64_t group = coord(rank).tp / side.topology.dcp;
    const std::uint64_t total = request.model.kv_heads;
    std::vector<std::uint64_t> out;
    for (std::uint64_t head = 0; head < total; ++head) {
      if (groups <= total ? head * groups / total == group : group * total / groups == head) {
        out.push_back(head);
      }
    }
    return out;
  }
  bool has_layer(RankIndex rank, std::uint64_t layer) const {
    std::uint64_t stage = 0;
    std::uint64_t left = 0;
    const std::uint64_t stages = side.topology.pp;
    const auto size = [&](std::uint64_t s) {
      return request.model.hidden_layers / stages + (s < request.model.hidden_layers % stages ? 1 : 0);
    };
    left = size(0);
    for (std::uint64_t l = 0; l < layer; ++l) {
      if (--left == 0) {
        left = size(++stage);
      }
    }
    return coord(rank).pp == stage;
  }
};

std::uint32_t bytes_of_head(const ModelGeometry& model, BufferKind kind) {
  const std::uint32_t elements = kind == BufferKind::kKey     ? model.head_dim
                                 : kind == BufferKind::kValue ? model.v_head_dim
                                                              : model.latent_dim + model.rope_dim;
  return 2 * elements;
}

/// Every holder's place and bytes against counting; which (rank, layer, head) it names.
void check_holders(const Counted& counted, const std::vector<TokenHolder>& holders, std::uint64_t token,
                   std::set<std::array<std::uint64_t, 3>>& named) {
  for (const TokenHolder& holder : holders) {
    REQUIRE(counted.owns(holder.rank, token));
    const std::uint64_t local = counted.rows_before(holder.rank, token);
    const std::uint64_t page = counted.side.pages.at(local / counted.side.page_size);
    REQUIRE(holder.place.page_index == local / counted.side.page_size);
    REQUIRE(holder.place.page == page);
    REQUIRE(holder.place.slot == local % counted.side.page_size);
    REQUIRE(holder.place.row == page * counted.side.page_size + local % counted.side.page_size);
    const auto heads = counted.heads(holder.rank);
    const auto first = std::find(heads.begin(), heads.end(), holder.heads.begin);
    REQUIRE(first != heads.end());
    REQUIRE(holder.parts.size() == (counted.request.model.attention == AttentionKind::kMla ? 1 : 2));
    for (const RowPart& part : holder.parts) {
      const std::uint64_t each = bytes_of_head(counted.request.model, part.kind);
      REQUIRE(part.offset == static_cast<std::uint64_t>(first - heads.begin()) * each);
      REQUIRE(part.bytes == holder.heads.size() * each);
      REQUIRE(part.row_bytes == heads.size() * each);
    }
    for (std::uint64_t layer = holder.layers.begin; layer < holder.layers.end; ++layer) {
      REQUIRE(counted.has_layer(holder.rank, layer));
      for (std::uint64_t head = holder.heads.begin; head < holder.heads.end; ++head) {
        REQUIRE(std::find(heads.begin(), heads.end(), head) != heads.end());
        named.insert({holder.rank, layer, head});
      }
    }
  }
}

/// Every owner of the token among the side's ranks, counted.
std::vector<RankIndex> counted_owners(const Counted& counted, std::uint64_t token) {
  std::vector<RankIndex> out;
  for (RankIndex rank = counted.side.first_rank();
       rank < counted.side.first_rank() + counted.side.rank_count(); ++rank) {
    if (counted.owns(rank, token)) {
      out.push_back(rank);
    }
  }
  return out;
}

void check_explanation(const PlanRequest& request, std::uint64_t token) {
  const auto found = explain(request, token);
  REQUIRE(found.has_value());
  const Counted prefill{request, request.prefill};
  const Counted decode{request, request.decode};
  REQUIRE(found->prefill_owners == counted_owners(prefill, token));
  REQUIRE(found->decode_owners == counted_owners(decode, token));
  REQUIRE(found->moves == (token >= request.prefix));
  if (!found->moves) {
    REQUIRE(found->elections.empty());
    return;
  }
  std::set<std::array<std::uint64_t, 3>> sources;
  std::set<std::array<std::uint64_t, 3>> destinations;
  check_holders(prefill, found->prefill, token, sources);
  check_holders(decode, found->decode, token, destinations);
  // Every (layer, head) of every decode rank that owns the token has one elected source that holds it.
  std::map<std::array<std::uint64_t, 3>, std::uint32_t> elected;
  for (const TokenElection& election : found->elections) {
    REQUIRE(std::count(election.candidates.begin(), election.candidates.end(), election.prefill) == 1);
    for (std::uint64_t layer = election.layers.begin; layer < election.layers.end; ++layer) {
      for (std::uint64_t head = election.heads.begin; head < election.heads.end; ++head) {
        ++elected[{election.decode, layer, head}];
        for (const RankIndex candidate : election.candidates) {
          REQUIRE(sources.contains({candidate, layer, head}));
        }
      }
    }
  }
  std::size_t expected = 0;
  for (const RankIndex rank : found->decode_owners) {
    for (std::uint64_t layer = 0; layer < request.model.hidden_layers; ++layer) {
      for (const std::uint64_t head : decode.heads(rank)) {
        if (decode.has_layer(rank, layer)) {
          ++expected;
          REQUIRE(elected[{rank, layer, head}] == 1);
          REQUIRE(destinations.contains({rank, layer, head}));
        }
      }
    }
  }
  REQUIRE(destinations.size() == expected);
  REQUIRE(elected.size() == expected);
}

PlannedSide random_side(Rng& random, bool is_prefill) {
  PlannedSide side;
  side.topology.dcp = random.between32(1, 3);
  side.topology.tp = side.topology.dcp * (1u << random.below(4));
  side.topology.pp = random.between32(1, 3);
  side.topology.cp = random.between32(1, 2);
  side.topology.cp_split = is_prefill ? static_cast<CpSplit>(random.below(3)) : CpSplit::kNone;
  side.topology.dp = random.between32(1, 2);
  side.topology.dcp_interleave = side.topology.dcp > 1 ? random.between32(1, 3) : 1;
  side.page_size = side.topology.dcp_interleave * random.between32(1, 4);
  side.dp_rank = random.between32(0, side.topology.dp - 1);
  return side;
}

}  // namespace

TEST_CASE("an explained token lies where counting finds it, and has one elected source per layer and head") {
  const auto seed = test_seed(0xE891);
  INFO("seed " << seed);
  Rng random(seed);
  for (int round = 0; round < 250; ++round) {
    PlanRequest request;
    request.model = small_model(random.chance(1, 2));
    request.prefill = random_side(random, true);
    request.decode = random_side(random, false);
    request.room = random.between(1, 1000);
    request.prefix = request.decode.virtual_page() * random.below(3);
    request.tokens = request.prefix + random.between(1, 60);
    request.prefill.first_token = request.prefix - request.prefix % request.prefill.virtual_page();
    request.decode.first_token = request.prefix;
    for (PlannedSide* side : {&request.prefill, &request.decode}) {
      for (std::uint32_t page = 0; page < 64; ++page) {
        side->pages.push_back(2 * page + (page > 5 ? 1 : 0));
      }
    }
    INFO("round " << round << ": prefill " << to_string(request.prefill.topology) << " pages of "
                  << request.prefill.page_size << ", decode " << to_string(request.decode.topology)
                  << " pages of " << request.decode.page_size << ", tokens " << request.prefix << " to "
                  << request.tokens);
    REQUIRE_FALSE(refuses(check_request(request)));
    for (int i = 0; i < 4; ++i) {
      check_explanation(request, random.below(request.tokens));
    }
  }
}
