#include <catch2/catch.hpp>

#include "common/topology/topology.h"
#include "tests/support/rng.h"
#include "tests/unit/plan/oracle.h"

namespace kvferry {
namespace {

using Catch::Matchers::Contains;

ModelGeometry mha(std::uint32_t heads, std::uint32_t layers = 4) {
  ModelGeometry model = *preset_geometry("llama-3.1-8b");
  model.kv_heads = heads;
  model.hidden_layers = layers;
  model.kv_layers.clear();
  for (std::uint32_t layer = 0; layer < layers; ++layer) {
    model.kv_layers.push_back(layer);
  }
  return model;
}

std::string refusal(const Topology& topology, const ModelGeometry& model) {
  const auto valid = validate(topology, model);
  return valid ? "" : valid.error().message;
}

}  // namespace

TEST_CASE("rank_index and coord are inverse, in the order dp, pp, cp, tp") {
  Topology topology;
  topology.tp = 4;
  topology.pp = 3;
  topology.cp = 2;
  topology.dp = 2;
  CHECK(topology.rank_count() == 48);
  CHECK(topology.rank_index({1, 2, 1, 1}) == ((1 * 3 + 2) * 2 + 1) * 4 + 1);
  for (RankIndex rank = 0; rank < topology.rank_count(); ++rank) {
    CHECK(topology.rank_index(topology.coord(rank)) == rank);
  }
}

TEST_CASE("a topology text reads back, in any order") {
  const auto topology = parse_topology("dcp=4,tp=8,interleave=2,pp=2,dp=3,pp_layers=31+30");
  REQUIRE(topology);
  CHECK(topology->tp == 8);
  CHECK(topology->dcp == 4);
  CHECK(topology->dcp_interleave == 2);
  CHECK(topology->pp_layers == std::vector<std::uint32_t>{31, 30});
  CHECK(to_string(*topology) == "tp=8,pp=2,dp=3,dcp=4,interleave=2,pp_layers=31+30");
  CHECK(parse_topology(to_string(*topology)).value() == *topology);
  CHECK(to_string(parse_topology("tp=1").value()) == "tp=1");
}

TEST_CASE("wrong topology texts are refused") {
  for (const char* text :
       {"", "tp", "tp=", "tp=0", "tp=-1", "tp=4097", "tp=99999999999", "tp=4,", "tp=4,,pp=2", "tp=4x", "ep=4",
        "tp=4,tp=4", "TP=4", "tp = 4", "pp_layers=", "pp_layers=3+", "pp_layers=3+0", "interleave=65537"}) {
    INFO(text);
    CHECK_FALSE(parse_topology(text));
  }
  CHECK_THAT(parse_topology("ep=4").error().message, Contains("ep=4") && Contains("interleave"));
}

TEST_CASE("every violation of a topology is in one message") {
  Topology topology;
  topology.tp = 6;
  topology.dcp = 4;
  topology.pp = 2;
  topology.pp_layers = {1, 2};
  CHECK_THAT(refusal(topology, mha(4)), Contains("pp_layers has 2 stages") &&
                                            Contains("dcp 4 must divide tp 6") && Contains("pp_layers"));
  topology.tp = 0;
  topology.cp = 5000;
  CHECK_THAT(refusal(topology, mha(4)), Contains("tp is 0") && Contains("cp is 5000"));
}

TEST_CASE("sizes whose product is no sane number of ranks are refused") {
  Topology topology;
  topology.tp = topology.pp = topology.cp = topology.dp = 4096;
  CHECK_THAT(refusal(topology, mha(1, 4096)), Contains("281474976710656 ranks"));
}

TEST_CASE("DCP divides the TP group: heads are sharded over tp/dcp") {
  Topology topology;
  topology.tp = 4;
  topology.dcp = 2;
  const auto own = [&topology](const ModelGeometry& model, std::uint32_t tp) {
    return ownership(topology, model, {tp, 0, 0, 0});
  };
  CHECK(own(mha(8), 1).heads == Interval{0, 4});
  CHECK(own(mha(8), 2).heads == Interval{4, 8});
  CHECK(own(mha(8), 3).tokens == TokenClass{2, 1, 1});
  CHECK(own(mha(1), 3).replicas == 2);
  CHECK(own(mha(1), 1).replica == 0);
  CHECK(own(mha(1), 2).replica == 1);
  CHECK(own(*preset_geometry("kimi-k2"), 3).replica == 1);
  CHECK_THAT(refusal(topology, mha(3)), Contains("3 KV heads") && Contains("tp/dcp 4/2"));
}

TEST_CASE("CP ranks divide the pages of a request: published vectors, and zigzag") {
  const auto pages = [](CpSplit split, std::uint32_t cp, std::uint32_t rank, std::uint64_t count) {
    return cp_share({split, cp, rank}, 4, {100, 100 + 4 * count});
  };
  using Shares = std::vector<Interval>;
  CHECK(pages(CpSplit::kPages, 4, 0, 10) == Shares{{100, 112}});
  CHECK(pages(CpSplit::kPages, 4, 1, 10) == Shares{{112, 124}});
  CHECK(pages(CpSplit::kPages, 4, 2, 10) == Shares{{124, 132}});
  CHECK(pages(CpSplit::kPages, 4, 3, 10) == Shares{{132, 140}});
  CHECK(pages(CpSplit::kPages, 4, 2, 3) == Shares{{108, 112}});
  CHECK(pages(CpSplit::kPages, 4, 3, 3).empty());
  CHECK(pages(CpSplit::kZigzag, 2, 0, 8) == Shares{{100, 108}, {124, 132}});
  CHECK(pages(CpSplit::kZigzag, 2, 1, 8) == Shares{{108, 124}});
  CHECK(pages(CpSplit::kNone, 2, 0, 8) == Shares{{100, 132}});
  CHECK(pages(CpSplit::kNone, 2, 1, 8).empty());
  CHECK(cp_share({CpSplit::kPages, 2, 1}, 4, {0, 7}) == Shares{{4, 7}});  // the last page is partial
  CHECK(cp_share({CpSplit::kPages, 2, 1}, 4, {7, 7}).empty());
}

TEST_CASE("heads divide or replicate: BL-09 ownership") {
  Topology topology;
  topology.tp = 8;
  const ModelGeometry two = mha(2);
  const ModelGeometry four = mha(4);
  for (std::uint32_t tp = 0; tp < 8; ++tp) {
    CHECK(ownership(topology, two, {tp, 0, 0, 0}).heads == Interval{tp / 4, tp / 4 + 1});
    CHECK(ownership(topology, two, {tp, 0, 0, 0}).replicas == 4);
    CHECK(ownership(topology, four, {tp, 0, 0, 0}).heads == Interval{tp / 2, tp / 2 + 1});
  }
  topology.tp = 2;
  CHECK(ownership(topology, four, {1, 0, 0, 0}).heads == Interval{2, 4});
}

TEST_CASE("layers split evenly with the rest in front, or as pp_layers says") {
  Topology topology;
  topology.pp = 4;
  const ModelGeometry model = *preset_geometry("deepseek-v3");
  CHECK(ownership(topology, model, {0, 0, 0, 0}).layers == Interval{0, 16});
  CHECK(ownership(topology, model, {0, 1, 0, 0}).layers == Interval{16, 31});
  CHECK(ownership(topology, model, {0, 3, 0, 0}).layers == Interval{46, 61});
  const auto stages_are_right = [&topology, &model] {
    for (std::uint32_t layer = 0; layer < model.hidden_layers; ++layer) {
      const std::uint32_t stage = stage_of(topology, model.hidden_layers, layer);
      REQUIRE(ownership(topology, model, {0, stage, 0, 0}).layers.contains(layer));
    }
  };
  stages_are_right();
  topology.pp_layers = {1, 30, 20, 10};
  CHECK(ownership(topology, model, {0, 2, 0, 0}).layers == Interval{31, 51});
  stages_are_right();
}

TEST_CASE("owned_before counts owned tokens, meets() and met_before() say which classes share one") {
  const std::uint64_t seed = test::test_seed(7);
  INFO("KVF_SEED=" << seed);
  test::Rng rng(seed);
  for (int i = 0; i < 3000; ++i) {
    const auto random_class = [&rng] {
      TokenClass out;
      out.count = rng.between32(1, 8);
      out.rank = static_cast<std::uint32_t>(rng.below(out.count));
      out.interleave = rng.between32(1, 6);
      return out;
    };
    const TokenClass a = random_class();
    const TokenClass b = random_class();
    std::uint64_t owned = 0;
    bool share = false;
    for (std::uint64_t token = 0; token < 8 * 6 * 8 * 6; ++token) {
      if (token < 100 && a.owned_before(token) != owned) {
        FAIL("owned_before(" << token << ") of " << a.rank << "/" << a.count << "/" << a.interleave);
      }
      owned += a.owns(token);
      share = share || (a.owns(token) && b.owns(token));
    }
    REQUIRE(a.meets(b) == share);
    std::uint32_t met = 0;
    for (TokenClass peer{b.count, 0, b.interleave}; peer.rank < b.count; ++peer.rank) {
      REQUIRE(a.met_before(b, peer.rank) == met);
      met += a.meets(peer) ? 1 : 0;
    }
    REQUIRE(a.met_before(b, b.count) == met);
  }
}

TEST_CASE("classes at the limits of their sizes meet as they should") {
  const TokenClass wide{kParallelSizeMax, kParallelSizeMax - 1, kDcpInterleaveMax};
  const TokenClass fine{kParallelSizeMax, 0, kDcpInterleaveMax - 1};
  CHECK(wide.met_before(wide, kParallelSizeMax) == 1);
  CHECK(wide.meets(wide));
  CHECK(wide.met_before(fine, kParallelSizeMax) == kParallelSizeMax);
  CHECK(TokenClass{}.met_before(wide, kParallelSizeMax) == kParallelSizeMax);
  CHECK(wide.met_before(TokenClass{}, 1) == 1);
}

TEST_CASE("intervals intersect to their common part, or to nothing") {
  CHECK(intersect({2, 8}, {4, 10}) == Interval{4, 8});
  CHECK(intersect({2, 4}, {4, 10}).size() == 0);
  CHECK(Interval{5, 3}.size() == 0);
  CHECK(Interval{3, 5}.contains(3));
  CHECK_FALSE(Interval{3, 5}.contains(5));
}

}  // namespace kvferry
