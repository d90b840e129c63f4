// Faults that other products have been seen to have (shared case list, BL-...), as far as rooms are
// concerned, each with its kind and not with its numbers alone. Others of the list are in life_test.cc, by
// their id in the name of the test.
#include <catch2/catch.hpp>
#include <cstdio>

#include "tests/support/room_world.h"

using namespace kvferry;
using namespace kvferry::test;

namespace {

using Events = std::vector<std::string>;

void require_quiet(const RoomWorld& world) {
  for (const std::string& violation : world.violations) {
    FAIL_CHECK(violation);
  }
  CHECK(world.prefill.stats().rooms == 0);
  CHECK(world.decode.stats().rooms == 0);
  CHECK(world.decode.stats().waiting == 0);
  CHECK(world.decode.stats().live_pages + world.decode.stats().quarantined_pages == 0);
}

void require_landed(const RoomWorld& world, const WorldSpec& spec, Room room) {
  for (RankIndex rank = 0; rank < spec.decode.rank_count(); ++rank) {
    CHECK(world.decode_events(rank) == Events{fmt::format("landed {}", room)});
  }
  for (RankIndex rank = 0; rank < spec.prefill.rank_count(); ++rank) {
    CHECK(world.prefill_events(rank) == Events{fmt::format("landed {}", room)});
  }
  require_quiet(world);
}

WorldSpec four_stages(std::uint64_t seed) {
  WorldSpec spec;
  spec.model = small_mla(4);
  spec.prefill.pp = 4;
  spec.seed = seed;
  return spec;
}

/// Uses one aux slot for many rooms in turn: whatever stage and step comes first, and whoever gives up when.
/// A room that is left behind is aborted on decode, so that the slot goes to the next one at once.
std::uint64_t reuse_slot(std::uint64_t seed, bool one_sided, std::uint64_t rooms) {
  constexpr Room kSlot = 23;
  WorldSpec spec = four_stages(seed);
  spec.one_sided = one_sided;
  RoomWorld world(spec);
  world.connect();
  Rng rng(seed);
  std::uint64_t landed = 0;
  for (std::uint64_t round = 0; round < rooms; ++round) {
    const Room room = kSlot + kAuxSlots * (1 + round);
    world.use(room);
    REQUIRE(world.expect(0, room, 3, 0).has_value());
    std::vector<RankIndex> stages{0, 1, 2, 3};
    rng.shuffle(stages);
    bool gives_up = rng.chance(1, 3);
    for (const RankIndex stage : stages) {
      (void)world.send(stage, room, 0, 3, true);
      for (std::uint64_t steps = rng.below(6); steps > 0 && world.step(rng); --steps) {
      }
      if (gives_up && rng.chance(1, 2)) {
        (void)(rng.chance(1, 2) ? world.abort_decode(0, room) : world.abort_prefill(stage, room));
        gives_up = false;
      }
    }
    // Only until decode has its answer: what prefill still has to do goes on beside the next room.
    while (world.decode_events(0).size() == round && world.step(rng)) {
    }
    REQUIRE(world.decode_events(0).size() == round + 1);
    landed += world.decode_events(0).back().starts_with("landed") ? 1 : 0;
  }
  while (world.step(rng)) {
  }
  world.advance(std::chrono::seconds(301));
  while (world.step(rng)) {
  }
  INFO("seed " << seed << ", one-sided " << one_sided);
  require_quiet(world);
  return landed;
}

}  // namespace

// Only the last stage writes metadata, and a slot goes back when nothing can land in it any more. Every slot
// that nobody owns is watched after each step, and each landed room must have its own first token.
TEST_CASE("BL-08: with PP prefill a reused aux slot has the last stage's row of its own room, in any order") {
  const std::uint64_t seed = test_seed(20261208);
  std::printf("rooms/aux slot: KVF_SEED=%llu\n", static_cast<unsigned long long>(seed));
#ifdef KVF_SANITIZED
  constexpr std::uint64_t kWorlds = 20;
#else
  constexpr std::uint64_t kWorlds = 200;
#endif
  constexpr std::uint64_t kRooms = 50;
  constexpr std::uint64_t kAll = kWorlds * kRooms;
  std::uint64_t landed = 0;
  for (std::uint64_t world = 0; world < kWorlds; ++world) {
    landed += reuse_slot(seed + world, world % 2 == 1, kRooms);
  }
  std::printf("rooms/aux slot: %llu of %llu landed\n", static_cast<unsigned long long>(landed),
              static_cast<unsigned long long>(kAll));
  CHECK(landed > kAll / 2);
  CHECK(landed < kAll * 19 / 20);
}

TEST_CASE("BL-08: the last stage sends the aux row whichever rank of it is elected, for every replica") {
  WorldSpec spec = four_stages(1);
  spec.prefill.tp = 4;  // four copies of each stage's latents
  RoomWorld world(spec);
  world.connect();
  for (Room room = 1; room <= 40; ++room) {
    world.use(room);
    world.expect_all(room, 5);
    world.send_all(room, 5, 2);
    world.run();
  }
  CHECK(world.decode_events(0).size() == 40);
  require_quiet(world);
}

TEST_CASE("BL-12: a refused service fails its waiting rooms at once, with the rules' reason") {
  WorldSpec spec;
  spec.decode = tp(2);
  RoomWorld world(spec);
  world.use(7);
  world.expect_all(7, 8);
  world.refuse_service(Error{Code::kMismatch, "handshake refused, 1 rule violated: [topology] tp 4"});
  for (RankIndex rank = 0; rank < 2; ++rank) {
    CHECK(world.decode_events(rank) == Events{"failed 7 mismatch"});
  }
  CHECK(world.last_reason == "handshake refused, 1 rule violated: [topology] tp 4");
  require_quiet(world);
}

// Forced past the rules: prefill finds it when it plans the first chunk, and nobody is left waiting.
TEST_CASE("BL-12: what cannot be planned ends on both sides with the same reason, before any byte") {
  for (const BufferKind kind : {BufferKind::kConv, BufferKind::kRecurrent, BufferKind::kLatent}) {
    WorldSpec spec;
    spec.model = small_mla(2);
    spec.model.hidden_layers = 3;
    spec.model.state_layers = {2};
    spec.model.state = {{is_state(kind) ? kind : BufferKind::kConv, 1, {8}, 4}};
    spec.decode_pools = spec.model;
    if (is_state(kind)) {
      spec.decode_pools.state[0].element_bytes = 2;
    } else {
      spec.decode_pools.latent_dim += 1;
    }
    spec.decode = tp(4);
    RoomWorld world(spec);
    world.connect();
    world.use(8);
    world.expect_all(8, 10);
    world.send_all(8, 10, 4);
    world.run();
    for (RankIndex rank = 0; rank < 4; ++rank) {
      CHECK(world.decode_events(rank) == Events{"failed 8 mismatch"});
    }
    CHECK(world.prefill_events(0) == Events{"failed 8 mismatch"});
    INFO(world.last_reason);
    CHECK(world.last_reason.find(to_string(kind)) != std::string::npos);
    CHECK(world.last_reason.find("decode has row_bytes") != std::string::npos);
    CHECK(world.bytes_posted == 0);
    require_quiet(world);
  }
}

TEST_CASE("BL-19: a full prefix hit lands at once, though prefill is never reached") {
  WorldSpec spec;
  RoomWorld world(spec);
  world.use(3);
  REQUIRE(world.expect(0, 3, 8, 8, false).has_value());
  CHECK(world.decode_events(0) == Events{"landed 3"});
  CHECK(world.decode.stats().live_pages == 0);
  // Whatever happened to the message for prefill: its room ends at the deadline, decode says nothing twice.
  world.advance(std::chrono::seconds(301));
  world.run();
  CHECK(world.decode_events(0) == Events{"landed 3"});
  require_quiet(world);
}

TEST_CASE("BL-19: a full prefix hit stays landed when the connection is lost before prefill hears of it") {
  WorldSpec spec;
  RoomWorld world(spec);
  world.connect();
  world.use(3);
  world.expect_all(3, 8, 8, false);
  CHECK(world.send(0, 3, 8, 0, true).has_value());
  world.lose_connection();
  world.run();
  world.advance(std::chrono::seconds(301));
  world.run();
  CHECK(world.decode_events(0) == Events{"landed 3"});
  CHECK(world.prefill_events(0).size() == 1);
  require_quiet(world);
}

// Every way in which a rank has nothing to move, with and without the aux row, which then is all there is.
TEST_CASE("BL-19: whoever has nothing to move completes all the same") {
  struct Nothing {
    const char* what;
    WorldSpec spec;
    std::uint64_t tokens;
    std::uint64_t prefix;
  };
  std::vector<Nothing> cases;
  const auto add = [&](const char* what, std::uint64_t tokens, std::uint64_t prefix, auto change) {
    Nothing& nothing = cases.emplace_back(Nothing{what, {}, tokens, prefix});
    change(nothing.spec);
  };
  add("an empty prompt", 0, 0, [](WorldSpec&) {});
  add("a full prefix hit", 8, 8, [](WorldSpec&) {});
  add("a full prefix hit over DCP", 16, 16, [](WorldSpec& spec) { spec.decode = tp(4, 4); });
  add("five tokens over DCP 8", 5, 0, [](WorldSpec& spec) { spec.decode = tp(8, 8); });
  add("one token over DCP 8 on both sides", 1, 0, [](WorldSpec& spec) {
    spec.prefill = tp(8, 8);
    spec.decode = tp(8, 8);
  });
  add("replicas that are not elected", 6, 0, [](WorldSpec& spec) { spec.prefill = tp(8); });
  add("CP ranks beyond the pages", 3, 0, [](WorldSpec& spec) {
    spec.prefill.cp = 4;
    spec.prefill.cp_split = CpSplit::kZigzag;
  });
  add("CP ranks that send nothing", 6, 0, [](WorldSpec& spec) { spec.prefill.cp = 3; });
  for (const Nothing& nothing : cases) {
    for (const bool aux : {false, true}) {
      INFO(nothing.what << ", aux " << aux);
      RoomWorld world(nothing.spec);
      world.connect();
      world.use(4);
      world.expect_all(4, nothing.tokens, nothing.prefix, aux);
      world.send_all(4, nothing.tokens, 64, nothing.prefix);
      world.run();
      const std::uint64_t rows = nothing.tokens - nothing.prefix;
      const std::uint64_t copies = nothing.spec.decode.tp / nothing.spec.decode.dcp;
      CHECK(world.bytes_posted == rows * copies * nothing.spec.model.bytes_per_token() +
                                      (aux ? nothing.spec.decode.rank_count() * 128 : 0));
      require_landed(world, nothing.spec, 4);
    }
  }
}
