// What crosses the end of a room on its way: an abort, a chunk, a fence, a grant. None of it may touch the
// next use of that room. All of these were found by the simulator.
#include <catch2/catch.hpp>

#include "tests/support/room_world.h"

using namespace kvferry;
using namespace kvferry::test;

namespace {

using Events = std::vector<std::string>;

constexpr EngineId kPrefillEngine = 1;  // RoomWorld numbers its engines, prefill first

WorldSpec one_to_one() {
  WorldSpec spec;
  spec.prefill = tp(1);
  spec.decode = tp(1);
  return spec;
}

void land(RoomWorld& world, Room room, bool grant_first) {
  world.use(room);
  if (grant_first) {
    world.expect_all(room, 8);
    world.run();
    world.send_all(room, 8, 8);
  } else {
    world.send_all(room, 8, 8);
    world.expect_all(room, 8);
  }
  world.run();
}

}  // namespace

TEST_CASE("an abort that crosses the end of its room does not touch the next use of it") {
  for (const bool grant_first : {true, false}) {
    RoomWorld world(one_to_one());
    world.connect();
    land(world, 7, true);
    prefill::Actions actions;
    CHECK(world.prefill.abort(1, kPrefillEngine, {7, "client left", true}, actions).has_value());
    CHECK(actions.empty());
    land(world, 7, grant_first);
    CHECK(world.decode_events(0) == Events{"landed 7", "landed 7"});
    CHECK(world.prefill_events(0) == Events{"landed 7", "landed 7"});
  }
}

TEST_CASE("an abort that crosses the end of its room does not touch the grant of the next use") {
  RoomWorld world(one_to_one());
  world.connect();
  land(world, 7, true);
  world.use(7);
  world.expect_all(7, 8);
  world.run();
  prefill::Actions actions;
  CHECK(world.prefill.abort(1, kPrefillEngine, {7, "client left", true}, actions).has_value());
  world.send_all(7, 8, 8);
  world.run();
  CHECK(world.decode_events(0) == Events{"landed 7", "landed 7"});
}

TEST_CASE("a chunk that crosses the end of its room is refused and begins nothing") {
  RoomWorld world(one_to_one());
  world.connect();
  world.use(7);
  world.expect_all(7, 8);
  CHECK(world.send(0, 7, 0, 4, false).has_value());
  world.run();
  CHECK(world.abort_decode(0, 7).has_value());
  world.run();
  CHECK(world.prefill_events(0) == Events{"aborted 7"});
  EngineChunk late;
  late.room = 7;
  late.pages = {0, 1};
  late.first_token = 4;
  late.token_count = 4;
  late.last = true;
  late.begun = true;
  prefill::Actions actions;
  const auto sent = world.prefill.send(1, kPrefillEngine, std::move(late), 0, {}, actions);
  REQUIRE_FALSE(sent.has_value());
  CHECK(sent.error().code == Code::kAborted);
  CHECK(sent.error().message.find("aborted by the decode engine of rank 0") != std::string::npos);
  CHECK(world.prefill.stats().rooms == 0);
  land(world, 7, true);
  CHECK(world.decode_events(0).back() == "landed 7");
}

TEST_CASE("the fence of an earlier use does not release a chunk of the next one (BL-28)") {
  RoomWorld world(one_to_one());
  world.connect();
  const auto chunk = [] {
    EngineChunk out;
    out.room = 7;
    out.pages = {0, 1};
    out.first_token = 0;
    out.token_count = 4;
    return out;
  };
  prefill::Actions actions;
  CHECK(world.prefill.send(1, kPrefillEngine, chunk(), 100, {}, actions).has_value());
  CHECK(world.prefill.abort(1, kPrefillEngine, {7, "", true}, actions).has_value());
  CHECK(world.prefill.stats().rooms == 0);
  world.use(7);
  world.expect_all(7, 4, 0, false);
  world.run();  // the grant is refused: it could be the aborted use's
  world.expect_all(7, 4, 0, false);
  world.run();
  actions.clear();
  CHECK(world.prefill.send(2, kPrefillEngine, chunk(), 101, {}, actions).has_value());
  world.prefill.chunk_ready(3, kPrefillEngine, 7, 100, actions);
  const auto posts = [&actions] {
    return std::count_if(actions.begin(), actions.end(), [](const prefill::Action& action) {
      return std::holds_alternative<prefill::PostChunk>(action);
    });
  };
  CHECK(posts() == 0);
  world.prefill.chunk_ready(3, kPrefillEngine, 7, 101, actions);
  CHECK(posts() == 1);
}

TEST_CASE("a decode rank that comes late to a use that has ended is told why, once") {
  WorldSpec spec = one_to_one();
  spec.decode = tp(2);
  RoomWorld world(spec);
  world.connect();
  world.use(7);
  CHECK(world.expect(0, 7, 8, 0).has_value());
  CHECK(world.send(0, 7, 0, 4, false).has_value());
  world.run();
  CHECK(world.abort_prefill(0, 7).has_value());
  world.run();
  CHECK(world.decode_events(0) == Events{"aborted 7"});
  CHECK(world.expect(1, 7, 8, 0).has_value());
  world.run();
  CHECK(world.decode_events(1) == Events{"aborted 7"});
  CHECK(world.last_reason == "aborted by the prefill engine of rank 0: test");
  land(world, 7, true);
  CHECK(world.decode_events(0) == Events{"aborted 7", "landed 7"});
  CHECK(world.decode_events(1) == Events{"aborted 7", "landed 7"});
}

TEST_CASE("a full send queue holds chunks back and fails nothing (BL-41)") {
  WorldSpec spec = one_to_one();
  spec.jobs_per_peer_max = 3;
  spec.chunks_max = 3;
  RoomWorld world(spec);
  world.connect();
  for (Room room = 1; room <= 8; ++room) {
    world.use(room);
    world.expect_all(room, 14);
    world.send_all(room, 14, 2);  // seven chunks each
  }
  world.run();
  for (Room room = 1; room <= 8; ++room) {
    const Events events = world.decode_events(0);
    CHECK(std::count(events.begin(), events.end(), "landed " + std::to_string(room)) == 1);
  }
  for (const std::string& violation : world.violations) {
    FAIL_CHECK(violation);
  }
}
