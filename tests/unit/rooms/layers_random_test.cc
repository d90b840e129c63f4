// Random layouts, chunks and groups of layers: what lands is what lands by whole chunks, byte for byte, and
// what the sources say of it is the same.
#include <catch2/catch.hpp>
#include <cstdio>

#include "tests/support/room_world.h"

using namespace kvferry;
using namespace kvferry::test;

namespace {

struct Tally {
  std::uint64_t groups = 0;
  std::uint64_t rooms = 0;
  std::uint64_t hybrid = 0;
};

WorldSpec random_layout(Rng& rng, Tally& tally) {
  WorldSpec spec;
  spec.seed = rng.next();
  spec.verify = kVerifyFull;
  spec.page_size = rng.between32(1, 3);
  spec.one_sided = rng.chance(1, 2);
  spec.jobs_per_peer_max = rng.chance(1, 2) ? 2 : 4096;
  const std::uint32_t layers = rng.between32(2, 6);
  const bool mla = rng.chance(1, 2);
  spec.model = mla ? small_mla(layers) : small_gqa(4, layers);
  (mla ? spec.model.latent_dim : spec.model.head_dim) = 16;
  (mla ? spec.model.rope_dim : spec.model.v_head_dim) = 16;
  const std::uint32_t decode_tp = 1u << rng.below(3);
  spec.prefill = tp(1u << rng.below(3));
  spec.decode = tp(decode_tp, mla && rng.chance(1, 2) ? decode_tp : 1);
  if (rng.chance(1, 3)) {  // some layers keep a window, or state
    spec.model.kv_layers.clear();
    const std::uint32_t full = rng.between32(0, layers - 1);
    for (std::uint32_t layer = 0; layer < layers; ++layer) {
      const std::uint64_t kind = layer == full ? 0 : rng.below(3);
      auto& kept = kind == 0   ? spec.model.kv_layers
                   : kind == 1 ? spec.model.sliding_layers
                               : spec.model.state_layers;
      kept.push_back(layer);
    }
    spec.model.sliding_window = spec.model.sliding_layers.empty() ? 0 : rng.between32(1, 7);
    if (!spec.model.state_layers.empty()) {
      spec.model.state = {{BufferKind::kConv, 1, {8}, 4}, {BufferKind::kRecurrent, 1, {4}, 16}};
    }
    ++tally.hybrid;
  } else if (rng.chance(1, 2)) {
    spec.prefill.pp = 2;
  } else if (rng.chance(1, 2)) {
    spec.decode.pp = 2;
  }
  spec.model.draft_layers = rng.chance(1, 4) ? 1 : 0;
  return spec;
}

/// One room, every rank cutting it into its own groups when `by_layers`. The chunks are those of `cuts`.
void play(RoomWorld& world, const WorldSpec& spec, std::uint64_t seed, bool by_layers, Tally& tally) {
  Rng rng(seed);
  Rng shape(seed + 1);  // the same with and without layers
  const std::uint64_t v = std::uint64_t{spec.page_size} * spec.decode.dcp;
  const std::uint64_t tokens = shape.between(1, 14);
  const std::uint64_t prefix = std::min(tokens / v, shape.below(3)) * v;
  world.connect();
  world.use(7);
  const bool first = shape.chance(1, 2);
  if (first) {
    world.expect_all(7, tokens, prefix);
  }
  for (RankIndex rank = 0; rank < spec.prefill.rank_count(); ++rank) {
    const Interval all = layers_of(world.prefill_rank(rank));
    std::uint64_t at = prefix;
    do {
      const std::uint64_t count = std::min<std::uint64_t>(spec.page_size * shape.between(1, 4), tokens - at);
      const bool last = at + count == tokens;
      std::uint64_t layer = all.begin;
      while (by_layers && count > 0 && layer + 1 < all.end && rng.chance(3, 4)) {
        const std::uint64_t end = rng.between(layer + 1, all.end - 1);
        REQUIRE(world.send_layers(rank, 7, at, count, {layer, end}, false).has_value());
        layer = end;
        ++tally.groups;
        for (std::uint64_t i = rng.below(3); i > 0; --i) {
          world.step(rng);
        }
      }
      const Interval rest = layer == all.begin ? Interval{} : Interval{layer, all.end};
      REQUIRE(world.send_layers(rank, 7, at, count, rest, last).has_value());
      at += count;
    } while (at < tokens);
  }
  if (!first) {
    world.expect_all(7, tokens, prefix);
  }
  while (world.step(rng)) {
  }
  for (const std::string& violation : world.violations) {
    FAIL_CHECK(violation);
  }
  CHECK(world.prefill.stats().rooms == 0);
  CHECK(world.decode.stats().rooms == 0);
  for (RankIndex rank = 0; rank < spec.decode.rank_count(); ++rank) {
    CHECK(world.decode_events(rank) == std::vector<std::string>{"landed 7"});
  }
  ++tally.rooms;
}

}  // namespace

TEST_CASE("any chunks by any groups of layers land the bytes that whole chunks land, in any two layouts") {
  const std::uint64_t seed = test_seed(20261201);
  std::printf("rooms/layers: seed %llu\n", static_cast<unsigned long long>(seed));
#ifdef KVF_SANITIZED
  constexpr std::uint64_t kWorlds = 60;
#else
  constexpr std::uint64_t kWorlds = 400;
#endif
  Tally tally;
  for (std::uint64_t i = 0; i < kWorlds; ++i) {
    Rng rng(seed + i);
    const WorldSpec spec = random_layout(rng, tally);
    INFO("seed " << seed + i << ": " << to_string(spec.prefill) << " to " << to_string(spec.decode) << ", "
                 << spec.model.hidden_layers << " layers, page " << spec.page_size);
    RoomWorld layered(spec);
    play(layered, spec, seed + i, true, tally);
    RoomWorld whole(spec);
    play(whole, spec, seed + i, false, tally);
    CHECK(layered.bytes_posted == whole.bytes_posted);
    CHECK(layered.digests == whole.digests);
    for (RankIndex rank = 0; rank < spec.decode.rank_count(); ++rank) {
      CHECK(layered.landed_pools(rank) == whole.landed_pools(rank));
    }
  }
  std::printf("rooms/layers: %llu rooms, %llu groups before the last of their tokens, %llu hybrid models\n",
              static_cast<unsigned long long>(tally.rooms), static_cast<unsigned long long>(tally.groups),
              static_cast<unsigned long long>(tally.hybrid));
  CHECK(tally.groups > kWorlds);
  CHECK(tally.hybrid > kWorlds / 5);
}
