#include <catch2/catch.hpp>

#include <algorithm>
#include <map>
#include <set>

#include "common/plan/plan.h"
#include "common/topology/rank_map.h"

namespace kvferry {
namespace {

using Catch::Matchers::Contains;
using Ranks = std::vector<RankIndex>;

Topology layout(const char* text) {
  return *parse_topology(text);
}

ModelGeometry mha(std::uint32_t heads) {
  ModelGeometry model = *preset_geometry("llama-3.1-8b");
  model.kv_heads = heads;
  return model;
}

ModelGeometry mla() {
  return *preset_geometry("kimi-k2");
}

DecodeTargets targets(const ModelGeometry& model, const char* prefill, const char* decode, RankIndex rank,
                      Room room = 1) {
  return decode_targets(model, layout(prefill), layout(decode), rank, 0, room);
}

}  // namespace

TEST_CASE("equal TP: each decode rank has its own prefill rank") {
  for (const ModelGeometry& model : {mha(8), mla()}) {
    const DecodeTargets own = targets(model, "tp=4", "tp=4", 3);
    CHECK(own.targets == Ranks{3});
    CHECK(own.sources == Ranks{3});
    CHECK(own.aux_source == 3);
    CHECK(own.required_dst_info_num == 1);
    CHECK(own.required_prefill_response_num == 1);
  }
}

TEST_CASE("decode TP above prefill TP: one source, which waits for D/S grants") {
  const DecodeTargets one = targets(mha(8), "tp=4", "tp=8", 5);
  CHECK(one.targets == Ranks{2});
  CHECK(one.required_dst_info_num == 2);
  CHECK(prefill_destinations(mha(8), layout("tp=4"), layout("tp=8"), 2, 0) == Ranks{4, 5});
}

TEST_CASE("prefill TP above decode TP: all ranks of the group send heads, exactly one sends a latent") {
  const DecodeTargets heads = targets(mha(8), "tp=8", "tp=2", 1);
  CHECK(heads.targets == Ranks{4, 5, 6, 7});
  CHECK(heads.sources == Ranks{4, 5, 6, 7});
  CHECK(heads.required_prefill_response_num == 4);
  std::map<RankIndex, int> chosen;
  for (Room room = 1; room <= 800; ++room) {
    const DecodeTargets latent = targets(mla(), "tp=8", "tp=2", 1, room);
    REQUIRE(latent.targets == Ranks{4, 5, 6, 7});
    REQUIRE(latent.sources.size() == 1);
    REQUIRE(latent.aux_source == latent.sources[0]);
    REQUIRE(latent.required_prefill_response_num == 1);
    ++chosen[latent.sources[0]];
  }
  CHECK(chosen.size() == 4);
  CHECK(std::all_of(chosen.begin(), chosen.end(), [](const auto& entry) { return entry.second > 100; }));
}

TEST_CASE("BL-22: prefill PP multiplies the sources, and the last stage sends the aux row") {
  CHECK(targets(mha(8), "tp=4", "tp=2", 0).sources == Ranks{0, 1});
  const DecodeTargets stages = targets(mha(8), "tp=4,pp=2", "tp=2", 0);
  CHECK(stages.sources == Ranks{0, 1, 4, 5});
  CHECK(stages.aux_source == 4);
  CHECK(stages.required_prefill_response_num == 4);
  CHECK(targets(mha(8), "tp=2,pp=2", "tp=2,pp=2", 3).targets == Ranks{3});
}

TEST_CASE("BL-23: eight decode ranks of TP 1 spread over eight prefill ranks, one copy each") {
  const Topology prefill = layout("tp=8");
  const Topology decode = layout("tp=1,dp=8");
  std::map<RankIndex, int> served;
  for (Room room = 1; room <= 800; ++room) {
    const auto rank = static_cast<RankIndex>(room % 8);
    const DecodeTargets to = decode_targets(mla(), prefill, decode, rank, 0, room);
    REQUIRE(to.targets.size() == 8);
    REQUIRE(to.sources.size() == 1);
    ++served[to.sources[0]];
  }
  CHECK(served.size() == 8);
  for (const auto& [rank, count] : served) {
    CHECK(count > 50);
    CHECK(count < 200);
  }
}

TEST_CASE("routing by room % dp leaves no replica of a DP rank without work") {
  const Topology prefill = layout("tp=2,dp=2");
  std::set<RankIndex> used;
  for (Room room = 1; room <= 100; ++room) {
    const auto dp = static_cast<std::uint32_t>(room % 2);
    used.insert(decode_targets(mla(), prefill, layout("tp=1"), 0, dp, room).sources.at(0));
  }
  CHECK(used == std::set<RankIndex>{0, 1, 2, 3});
}

// The published election table: S, D, H -> replicas per destination.
TEST_CASE("exactly one replica per distinct head and destination is elected") {
  struct Row {
    std::uint32_t s, d, h, replicas;
  };
  for (const Row& row : {Row{8, 1, 1, 8}, Row{8, 1, 2, 4}, Row{8, 2, 4, 2}, Row{8, 4, 2, 2}, Row{8, 4, 4, 2},
                         Row{8, 2, 8, 1}, Row{4, 2, 16, 1}, Row{4, 8, 2, 1}}) {
    INFO(row.s << " " << row.d << " " << row.h);
    const ModelGeometry model = mha(row.h);
    Topology prefill;
    prefill.tp = row.s;
    Topology decode;
    decode.tp = row.d;
    REQUIRE(validate_pair(model, prefill, decode));
    std::set<RankIndex> ever;
    for (Room room = 1; room <= 200; ++room) {
      for (RankIndex rank = 0; rank < row.d; ++rank) {
        const DecodeTargets to = decode_targets(model, prefill, decode, rank, 0, room);
        std::multiset<std::uint64_t> heads;
        for (const RankIndex source : to.sources) {
          REQUIRE(std::find(to.targets.begin(), to.targets.end(), source) != to.targets.end());
          REQUIRE(rank_pairing(model, prefill, prefill.coord(source), decode, decode.coord(rank)).replicas ==
                  row.replicas);
          const Interval own = ownership(prefill, model, prefill.coord(source)).heads;
          for (std::uint64_t head = own.begin; head < own.end; ++head) {
            heads.insert(head);
          }
          ever.insert(source);
        }
        const Interval wanted = ownership(decode, model, decode.coord(rank)).heads;
        for (std::uint64_t head = wanted.begin; head < wanted.end; ++head) {
          REQUIRE(heads.count(head) == 1);
        }
      }
    }
    CHECK(ever.size() == row.s);
  }
}

TEST_CASE("1 -> N DCP: the published TP map, every source sends its ranks' tokens") {
  CHECK(targets(mla(), "tp=1", "tp=8,dcp=8", 5).sources == Ranks{0});
  CHECK(targets(mla(), "tp=1", "tp=8,dcp=8", 5).required_dst_info_num == 8);
  CHECK(targets(mla(), "tp=8", "tp=8,dcp=8", 5).sources == Ranks{5});
}

TEST_CASE("N -> N DCP pairs matching DCP ranks only") {
  for (RankIndex rank = 0; rank < 8; ++rank) {
    CHECK(targets(mla(), "tp=8,dcp=4", "tp=8,dcp=4", rank).targets == Ranks{rank});
    const DecodeTargets wider = targets(mla(), "tp=4,dcp=4", "tp=8,dcp=4", rank);
    CHECK(wider.targets == Ranks{rank % 4});
    CHECK(wider.required_dst_info_num == 2);
  }
  // The contiguous group {2, 3} of decode rank 1 holds no token of DCP rank 1; ranks 1 and 5 do.
  const DecodeTargets narrow = targets(mla(), "tp=8,dcp=4", "tp=4,dcp=4", 1);
  CHECK(narrow.targets == Ranks{1, 5});
  CHECK(narrow.required_prefill_response_num == 1);
}

TEST_CASE("N -> 1 and N -> M: one source per DCP rank that holds needed tokens") {
  CHECK(targets(mla(), "tp=4,dcp=4", "tp=1", 0).sources == Ranks{0, 1, 2, 3});
  CHECK(targets(mla(), "tp=2,dcp=2", "tp=4,dcp=4", 3).sources == Ranks{1});
  CHECK(targets(mla(), "tp=4,dcp=4", "tp=2,dcp=2", 1).sources == Ranks{1, 3});
}

// Claim: over the destinations of one room that hold the same heads and tokens, no replica serves two more
// than another. 4.2's table (D a multiple of S, or S of D) is the special case in which all serve alike.
TEST_CASE("replicas are dealt out within one destination of each other, whatever the sizes") {
  for (std::uint32_t s = 1; s <= 12; ++s) {
    for (std::uint32_t d = 1; d <= 12; ++d) {
      Topology prefill;
      prefill.tp = s;
      Topology decode;
      decode.tp = d;
      for (Room room = 1; room <= 5; ++room) {
        std::vector<int> served(s);
        for (RankIndex rank = 0; rank < d; ++rank) {
          const DecodeTargets to = decode_targets(mla(), prefill, decode, rank, 0, room);
          REQUIRE(to.sources.size() == 1);
          ++served[to.sources[0]];
        }
        const auto [least, most] = std::minmax_element(served.begin(), served.end());
        INFO("S=" << s << " D=" << d << " room " << room);
        REQUIRE(*most - *least <= 1);
      }
    }
  }
}

TEST_CASE("replicas are dealt out over the decode ranks that need them, stages and DCP ranks included") {
  // Eight copies, four decode ranks in each of two stages: one copy for each.
  for (RankIndex rank = 0; rank < 8; ++rank) {
    CHECK(targets(mla(), "tp=8", "tp=4,pp=2", rank).targets == Ranks{2 * (rank % 4) + rank / 4});
  }
  // Three copies of each DCP rank's tokens, two decode ranks that need them.
  CHECK(targets(mla(), "tp=6,dcp=2", "tp=4,dcp=2", 0).targets == Ranks{0});
  CHECK(targets(mla(), "tp=6,dcp=2", "tp=4,dcp=2", 1).targets == Ranks{1});
  CHECK(targets(mla(), "tp=6,dcp=2", "tp=4,dcp=2", 2).targets == Ranks{2, 4});
  CHECK(targets(mla(), "tp=6,dcp=2", "tp=4,dcp=2", 3).targets == Ranks{3, 5});
  // Uneven stages: prefill stage 1 is the end of decode stage 0 and all of stage 1.
  CHECK(targets(mla(), "tp=2,pp=2,pp_layers=20+41", "tp=1,pp=2,pp_layers=40+21", 0).targets ==
        Ranks{0, 1, 2});
  CHECK(targets(mla(), "tp=2,pp=2,pp_layers=20+41", "tp=1,pp=2,pp_layers=40+21", 1).targets == Ranks{3});
}

TEST_CASE("a TP size that is no multiple of the other meets the ranks whose heads it shares") {
  CHECK(targets(mha(6), "tp=3", "tp=2", 0).sources == Ranks{0, 1});
  CHECK(targets(mha(6), "tp=3", "tp=2", 1).sources == Ranks{1, 2});
  CHECK(targets(mha(6), "tp=2", "tp=3", 1).sources == Ranks{0, 1});
}

TEST_CASE("GQA with DCP: TP4 -> TP2 x DCP2, each decode rank draws its heads from two ranks") {
  CHECK(targets(mha(8), "tp=4", "tp=4,dcp=2", 0).sources == Ranks{0, 1});
  CHECK(targets(mha(8), "tp=4", "tp=4,dcp=2", 1).sources == Ranks{0, 1});
  CHECK(targets(mha(8), "tp=4", "tp=4,dcp=2", 3).sources == Ranks{2, 3});
}

TEST_CASE("CP ranks that divide the pages are all sources") {
  CHECK(targets(mla(), "tp=2,cp=2,cp_split=zigzag", "tp=2", 1).sources == Ranks{1, 3});
  CHECK(targets(mla(), "tp=2,cp=2", "tp=2,cp=2", 3).sources == Ranks{1});
}

TEST_CASE("prefill CP ranks above 0 finish with the request when CP rank 0 sends all") {
  const Topology prefill = layout("tp=2,cp=2");
  CHECK(targets(mla(), "tp=2,cp=2", "tp=2", 1).targets == Ranks{1, 3});
  CHECK(targets(mla(), "tp=2,cp=2", "tp=2", 1).sources == Ranks{1});
  CHECK(prefill_destinations(mla(), prefill, layout("tp=2"), 3, 0) == Ranks{1});
}

TEST_CASE("pairs that cannot be mapped are refused with both values") {
  const auto refusal = [](const ModelGeometry& model, const char* prefill, const char* decode) {
    const auto valid = validate_pair(model, layout(prefill), layout(decode));
    return valid ? std::string() : valid.error().message;
  };
  CHECK_THAT(refusal(mla(), "tp=4", "tp=4,cp=2,cp_split=pages"), Contains("decode cp_split is pages"));
  CHECK_THAT(refusal(mha(7), "tp=3", "tp=5"),
             Contains("prefill topology tp=3") && Contains("decode topology tp=5"));
  CHECK(refusal(mla(), "tp=16,pp=3", "tp=2,dcp=2").empty());
  CHECK(refusal(mla(), "tp=6", "tp=4").empty());
  CHECK(refusal(mha(8), "tp=4,cp=2", "tp=4,dcp=2,cp=2").empty());
}

}  // namespace kvferry
