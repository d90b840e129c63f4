// Random worlds: everything that can happen to rooms, in random order, with the pages watched.
#include <catch2/catch.hpp>
#include <cstdio>

#include "tests/support/room_world.h"

using namespace kvferry;
using namespace kvferry::test;

namespace {

struct Outcome {
  std::uint64_t landed = 0;
  std::uint64_t ended = 0;
};

// One world of a few rooms with aborts at random moments. Room ids are used again as soon as they are free.
void play(std::uint64_t seed, Outcome& outcome) {
  Rng rng(seed);
  WorldSpec spec;
  spec.seed = seed;
  spec.one_sided = rng.chance(1, 2);
  const std::uint32_t decode_tp = 1u << rng.below(3);
  if (rng.chance(1, 2)) {
    spec.model = small_gqa(4, 1);
    spec.prefill = tp(1u << rng.below(3));
    spec.decode = tp(decode_tp);
  } else {
    spec.model = small_mla(1);
    spec.prefill = tp(1u << rng.below(3));
    spec.decode = tp(decode_tp, rng.chance(1, 2) ? decode_tp : 1);
  }
  RoomWorld world(spec);
  world.connect();
  std::uint64_t uses = 0;
  for (int round = 0; round < 12; ++round) {
    const Room room = 1 + rng.below(3);
    const std::uint64_t v = std::uint64_t{spec.page_size} * spec.decode.dcp;
    const std::uint64_t tokens = 1 + rng.below(12);
    const std::uint64_t prefix = std::min(tokens / v, rng.below(3)) * v;
    const auto waiting = [&] { return world.decode.stats().rooms + world.prefill.stats().rooms > 0; };
    if (waiting() && rng.chance(2, 3)) {
      for (std::uint64_t i = rng.below(60); i > 0 && world.step(rng); --i) {
      }
      if (rng.chance(1, 2)) {
        (void)world.abort_decode(static_cast<RankIndex>(rng.below(spec.decode.tp)), room);
      } else if (rng.chance(1, 2)) {
        (void)world.abort_prefill(static_cast<RankIndex>(rng.below(spec.prefill.tp)), room);
      }
      continue;
    }
    while (world.step(rng)) {
    }
    if (waiting()) {
      break;  // a side without counterpart; its deadline ends it below
    }
    world.use(room);
    world.expect_all(room, tokens, prefix, rng.chance(3, 4));
    for (RankIndex rank = 0; rank < spec.prefill.tp; ++rank) {
      std::uint64_t at = prefix;
      bool alive = true;
      while (alive) {
        const std::uint64_t count = std::min<std::uint64_t>(2 * (1 + rng.below(3)), tokens - at);
        alive = world.send(rank, room, at, count, at + count == tokens).has_value() && at + count < tokens;
        at += count;
        if (rng.chance(1, 3)) {
          world.step(rng);
        }
      }
    }
    ++uses;
  }
  while (world.step(rng)) {
  }
  world.advance(std::chrono::seconds(301));
  while (world.step(rng)) {
  }
  INFO("seed " << seed << ", " << uses << " uses, one-sided " << spec.one_sided);
  for (const std::string& violation : world.violations) {
    FAIL_CHECK(violation);
  }
  CHECK(world.prefill.stats().rooms == 0);
  CHECK(world.decode.stats().rooms == 0);
  for (RankIndex rank = 0; rank < spec.decode.tp; ++rank) {
    CHECK(world.decode_events(rank).size() == uses);  // exactly one final event per accepted room
    for (const std::string& event : world.decode_events(rank)) {
      ++(event.starts_with("landed") ? outcome.landed : outcome.ended);
    }
  }
}

}  // namespace

TEST_CASE("random aborts never put a byte into pages that went back, and every room ends once") {
  const std::uint64_t seed = test_seed(20261130);
  std::printf("rooms/random: seed %llu\n", static_cast<unsigned long long>(seed));
#ifdef KVF_SANITIZED
  constexpr std::uint64_t kWorlds = 150;
#else
  constexpr std::uint64_t kWorlds = 1500;
#endif
  Outcome outcome;
  for (std::uint64_t i = 0; i < kWorlds; ++i) {
    play(seed + i, outcome);
  }
  std::printf("rooms/random: %llu landed, %llu aborted or failed\n",
              static_cast<unsigned long long>(outcome.landed),
              static_cast<unsigned long long>(outcome.ended));
  CHECK(outcome.landed > kWorlds);
  CHECK(outcome.ended > kWorlds / 2);
}
