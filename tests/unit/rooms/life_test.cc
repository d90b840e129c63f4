// The life of a room between both machines, without faults and with each fault by hand.
#include <catch2/catch.hpp>

#include "tests/support/room_world.h"

using namespace kvferry;
using namespace kvferry::test;
using std::chrono::seconds;

namespace {

using Events = std::vector<std::string>;

WorldSpec mla(std::uint32_t prefill_tp, std::uint32_t decode_tp, std::uint32_t dcp = 1) {
  WorldSpec spec;
  spec.prefill = tp(prefill_tp);
  spec.decode = tp(decode_tp, dcp);
  return spec;
}

void require_quiet(const RoomWorld& world) {
  for (const std::string& violation : world.violations) {
    FAIL_CHECK(violation);
  }
  CHECK(world.prefill.stats().rooms == 0);
  CHECK(world.decode.stats().rooms == 0);
  CHECK(world.decode.stats().live_pages + world.decode.stats().quarantined_pages == 0);
}

}  // namespace

TEST_CASE("a room lands on every decode rank with all bytes, in either order of send and expect") {
  for (const bool send_first : {true, false}) {
    RoomWorld world(mla(2, 4, 4));
    world.connect();
    world.use(7);
    if (send_first) {
      world.send_all(7, 21, 8);
    }
    world.expect_all(7, 21);
    if (!send_first) {
      world.send_all(7, 21, 8);
    }
    world.run();
    for (RankIndex rank = 0; rank < 4; ++rank) {
      CHECK(world.decode_events(rank) == Events{"landed 7"});
    }
    CHECK(world.prefill_events(0) == Events{"landed 7"});
    CHECK(world.prefill_events(1) == Events{"landed 7"});
    require_quiet(world);
  }
}

TEST_CASE("rooms that wait for the service are granted when it becomes ready") {
  RoomWorld world(mla(1, 2));
  world.use(9);
  world.expect_all(9, 12);
  world.send_all(9, 12, 12);
  world.run();
  CHECK(world.decode_events(0).empty());
  world.connect();
  world.run();
  CHECK(world.decode_events(0) == Events{"landed 9"});
  CHECK(world.decode_events(1) == Events{"landed 9"});
  require_quiet(world);
}

TEST_CASE("a full prefix hit without aux lands at once, and prefill finishes too (BL-19)") {
  RoomWorld world(mla(1, 1));
  world.use(3);
  CHECK(world.expect(0, 3, 8, 8, false).has_value());
  CHECK(world.decode_events(0) == Events{"landed 3"});
  world.connect();
  world.send_all(3, 8, 8, 8);
  world.run();
  CHECK(world.decode_events(0) == Events{"landed 3"});
  CHECK(world.prefill_events(0) == Events{"landed 3"});
  CHECK(world.bytes_posted == 0);
  require_quiet(world);
}

TEST_CASE("decode ranks that own no token of a short prompt land without a byte (BL-19)") {
  RoomWorld world(mla(1, 8, 8));
  world.connect();
  world.use(4);
  world.expect_all(4, 5, 0, false);
  world.send_all(4, 5, 5);
  world.run();
  for (RankIndex rank = 0; rank < 8; ++rank) {
    CHECK(world.decode_events(rank) == Events{"landed 4"});
  }
  CHECK(world.bytes_posted == 5ull * 2 * small_mla().head_bytes(BufferKind::kLatent));
  require_quiet(world);
}

TEST_CASE("decode waits for every source rank, whatever their order (BL-22)") {
  WorldSpec spec;
  spec.model = small_gqa(8, 2);
  spec.prefill = tp(4);
  spec.decode = tp(2);
  RoomWorld world(spec);
  world.connect();
  world.use(5);
  world.expect_all(5, 8);
  CHECK(world.send(0, 5, 0, 8, true).has_value());
  CHECK(world.send(2, 5, 0, 8, true).has_value());
  CHECK(world.send(3, 5, 0, 8, true).has_value());
  world.run();
  CHECK(world.decode_events(0).empty());  // rank 1 has not sent its heads
  CHECK(world.decode_events(1) == Events{"landed 5"});
  CHECK(world.send(1, 5, 0, 8, true).has_value());
  world.run();
  CHECK(world.decode_events(0) == Events{"landed 5"});
  require_quiet(world);
}

TEST_CASE("the MLA copy comes from one elected rank, spread over ranks by room; all ranks finish (BL-23)") {
  RoomWorld world(mla(8, 1));
  world.connect();
  for (Room room = 1; room <= 40; ++room) {
    world.use(room);
    world.expect_all(room, 8);
    world.send_all(room, 8, 8);
    world.run();
    for (RankIndex rank = 0; rank < 8; ++rank) {
      CHECK(world.prefill_events(rank).size() == room);
    }
  }
  const std::uint64_t per_room = 8ull * 2 * small_mla().head_bytes(BufferKind::kLatent) + 128;
  CHECK(world.bytes_posted == 40 * per_room);  // one copy each
  CHECK(world.bytes_by_prefill_rank.size() == 8);
  for (const auto& [rank, bytes] : world.bytes_by_prefill_rank) {
    CHECK(bytes >= per_room);
    CHECK(bytes <= 12 * per_room);
  }
  require_quiet(world);
}

TEST_CASE("decode may expect one token more than prefill computed, not two, and never fewer (BL-17, BL-29)") {
  for (const auto& [expected, lands] :
       std::vector<std::pair<std::uint64_t, bool>>{{8, true}, {9, true}, {10, false}, {6, false}}) {
    RoomWorld world(mla(1, 1));
    world.connect();
    world.use(6);
    // The extra token's row is decode's own; only compare what prefill had.
    CHECK(world.expect(0, 6, expected, 0).has_value());
    world.send_all(6, 8, 4);
    world.run();
    INFO("expected " << expected << ": " << world.last_reason);
    CHECK(world.decode_events(0) == Events{lands ? "landed 6" : "failed 6 mismatch"});
    CHECK(world.prefill_events(0) == Events{lands ? "landed 6" : "failed 6 mismatch"});
    CHECK(world.prefill.stats().rooms + world.decode.stats().rooms == 0);
    if (!lands) {
      CHECK(world.last_reason.find("prefill computed 8 tokens") != std::string::npos);
    }
  }
}

TEST_CASE("a room in flight refuses a second use and is unharmed; afterwards the id is free again (BL-30)") {
  RoomWorld world(mla(1, 1));
  world.connect();
  world.use(77);
  world.expect_all(77, 8);
  CHECK(world.send(0, 77, 0, 4, false).has_value());
  const auto again = world.expect(0, 77, 8, 0);
  REQUIRE_FALSE(again.has_value());
  CHECK(again.error().code == Code::kConflict);
  CHECK(http_status(again.error().code) == 409);
  const auto resend = world.send(0, 77, 0, 4, false);
  REQUIRE_FALSE(resend.has_value());
  CHECK(resend.error().code == Code::kConflict);
  CHECK(world.send(0, 77, 4, 4, true).has_value());
  world.run();
  CHECK(world.decode_events(0) == Events{"landed 77"});
  world.use(77);
  world.expect_all(77, 6);
  world.send_all(77, 6, 2);
  world.run();
  CHECK(world.decode_events(0) == Events{"landed 77", "landed 77"});
  world.use(77);
  world.expect_all(77, 6);
  CHECK(world.abort_decode(0, 77).has_value());
  world.run();
  world.use(77);
  world.expect_all(77, 6);
  world.run();  // before the new grant arrives, a send could belong to the aborted use and is told so
  world.send_all(77, 6, 2);
  world.run();
  CHECK(world.decode_events(0) == Events{"landed 77", "landed 77", "aborted 77", "landed 77"});
  require_quiet(world);
}

TEST_CASE("an abort on prefill fails decode with prefill's reason and frees its pages (BL-29)") {
  for (const bool one_sided : {false, true}) {
    WorldSpec spec = mla(1, 1);
    spec.one_sided = one_sided;
    RoomWorld world(spec);
    world.connect();
    world.use(8);
    world.expect_all(8, 10);
    CHECK(world.send(0, 8, 0, 2, false).has_value());
    CHECK(world.send(0, 8, 2, 2, false).has_value());
    CHECK(world.send(0, 8, 4, 2, false).has_value());
    CHECK(world.abort_prefill(0, 8).has_value());
    world.run();
    CHECK(world.decode_events(0) == Events{"aborted 8"});
    CHECK(world.prefill_events(0) == Events{"aborted 8"});
    CHECK(world.last_reason.find("aborted by the prefill engine of rank 0: test") != std::string::npos);
    require_quiet(world);
  }
}

TEST_CASE("an abort before the other side knows the room reaches it all the same") {
  {
    RoomWorld world(mla(1, 1));
    world.connect();
    world.use(8);
    CHECK(world.abort_prefill(0, 8).has_value());
    world.expect_all(8, 10);
    world.run();
    CHECK(world.decode_events(0) == Events{"aborted 8"});
    require_quiet(world);
  }
  RoomWorld world(mla(1, 1));
  world.connect();
  world.use(8);
  world.expect_all(8, 10);
  CHECK(world.abort_decode(0, 8).has_value());
  world.run();
  CHECK(world.decode_events(0) == Events{"aborted 8"});
  const auto late = world.send(0, 8, 0, 10, true);
  REQUIRE_FALSE(late.has_value());
  CHECK(late.error().code == Code::kAborted);
  require_quiet(world);
}

TEST_CASE("a lost connection fails every room on it with the peer's name, and pages come back (BL-25)") {
  for (const bool one_sided : {false, true}) {
    WorldSpec spec = mla(2, 4, 2);
    spec.one_sided = one_sided;
    RoomWorld world(spec);
    world.connect();
    for (Room room = 1; room <= 4; ++room) {
      world.use(room);
      world.expect_all(room, 16);
      CHECK(world.send(0, room, 0, 8, false).has_value());
      CHECK(world.send(1, room, 0, 8, false).has_value());
    }
    Rng rng(test_seed(11));
    for (int i = 0; i < 20; ++i) {
      world.step(rng);
    }
    world.lose_connection();
    world.run();
    for (RankIndex rank = 0; rank < 4; ++rank) {
      CHECK(world.decode_events(rank).size() == 4);
    }
    CHECK(world.last_reason.find("lost") != std::string::npos);
    world.advance(seconds(301));  // rooms whose grant was lost with the connection end at their deadline
    world.run();
    CHECK(world.prefill_events(0).size() == 4);
    require_quiet(world);
    world.connect();  // the same machines serve the next session
    world.use(9);
    world.expect_all(9, 16);
    world.send_all(9, 16, 8);
    world.run();
    CHECK(world.decode_events(0).back() == "landed 9");
    require_quiet(world);
  }
}

TEST_CASE("the death of an engine ends its rooms on the other side and keeps its pool until drained") {
  {
    RoomWorld world(mla(1, 2));
    world.connect();
    world.use(5);
    world.expect_all(5, 16);
    CHECK(world.send(0, 5, 0, 8, false).has_value());
    world.prefill_engine_dies(0);
    world.run();
    CHECK(world.decode_events(0) == Events{"failed 5 engine_lost"});
    CHECK(world.decode_events(1) == Events{"failed 5 engine_lost"});
    require_quiet(world);
  }
  RoomWorld world(mla(1, 2));
  world.connect();
  world.use(5);
  world.expect_all(5, 16);
  CHECK(world.send(0, 5, 0, 8, false).has_value());
  world.decode_engine_dies(1);
  CHECK_FALSE(world.decode.rank_attached(1));
  world.run();
  CHECK(world.prefill_events(0) == Events{"failed 5 engine_lost"});
  CHECK(world.decode_events(0) ==
        Events{"failed 5 engine_lost"});  // one failed rank fails the request everywhere
  require_quiet(world);
}

TEST_CASE("rooms whose counterpart never comes end at their deadline, on both sides, with the reason") {
  RoomWorld world(mla(1, 1));
  world.connect();
  world.use(1);
  world.use(2);
  world.expect_all(1, 8);                           // prefill never sends
  CHECK(world.send(0, 2, 0, 8, true).has_value());  // decode never expects
  world.run();
  CHECK(world.decode_events(0).empty());
  world.advance(seconds(299));
  world.run();
  CHECK(world.decode_events(0).empty());
  world.advance(seconds(2));
  world.run();
  CHECK(world.decode_events(0) == Events{"failed 1 deadline"});
  CHECK(world.prefill_events(0) == Events{"failed 2 deadline"});
  require_quiet(world);
}

TEST_CASE("what an engine asks for is checked before anything is accepted") {
  RoomWorld world(mla(1, 2, 2));
  world.connect();
  const auto refused = [](const Result<void>& result, const char* text) {
    REQUIRE_FALSE(result.has_value());
    INFO(result.error().message);
    CHECK(result.error().message.find(text) != std::string::npos);
  };
  refused(world.expect(0, 0, 8, 0), "room 0 is not from 1");
  refused(world.expect(0, kRoomMax + 1, 8, 0), "is not from 1");
  refused(world.expect(0, 1, 8, 2), "prefix 2 is not a multiple of page_size*dcp = 4");
  refused(world.send(0, 1, 1, 2, false), "first_token 1 is not a multiple of page_size*dcp = 2");
  refused(world.send(0, 1, 0, 3, false), "only the last chunk may end inside a page");
  refused(world.send(0, 1, 0, 0, false), "only the last chunk may be empty");
  CHECK(world.send(0, 1, 0, 4, false).has_value());
  refused(world.send(0, 1, 6, 2, false), "the chunks so far end at 4");
  CHECK(world.decode.stats().rooms == 0);
  CHECK(world.prefill.stats().rooms == 1);
}

TEST_CASE("limits refuse the one call and say which setting they are") {
  WorldSpec spec = mla(1, 1);
  spec.rooms_max = 2;
  spec.chunks_per_room_max = 2;
  RoomWorld world(spec);
  CHECK(world.expect(0, 1, 4, 0).has_value());
  CHECK(world.expect(0, 2, 4, 0).has_value());
  const auto third = world.expect(0, 3, 4, 0);
  REQUIRE_FALSE(third.has_value());
  CHECK(third.error().code == Code::kExhausted);
  CHECK(third.error().message.find("limits.rooms is 2") != std::string::npos);
  CHECK(world.send(0, 1, 0, 2, false).has_value());
  CHECK(world.send(0, 1, 2, 2, false).has_value());
  const auto chunk = world.send(0, 1, 4, 2, false);
  REQUIRE_FALSE(chunk.has_value());
  CHECK(chunk.error().message.find("limits.chunks_per_room is 2") != std::string::npos);
}

TEST_CASE("a stage of linear layers only names no pages, on either side, and moves its state") {
  for (const bool decode_stages : {false, true}) {
    for (const std::uint32_t decode_tp : {1u, 2u}) {
      WorldSpec spec;
      spec.model = small_mla(4);
      spec.model.kv_layers = {2, 3};
      spec.model.state_layers = {0, 1};
      spec.model.state = {{BufferKind::kConv, 1, {8}, 4}, {BufferKind::kRecurrent, 1, {4}, 16}};
      spec.prefill.pp = 2;
      spec.decode = tp(decode_tp);
      spec.decode.pp = decode_stages ? 2 : 1;
      RoomWorld world(spec);
      world.connect();
      for (const std::uint64_t prefix : {0u, 4u, 8u}) {
        const Room room = 5 + prefix;
        const std::uint64_t tokens = prefix == 8 ? 8 : 9;  // then all but the state is there already
        world.use(room);
        world.expect_all(room, tokens, prefix);
        world.send_all(room, tokens, 4, prefix);
        world.run();
        for (RankIndex rank = 0; rank < spec.decode.rank_count(); ++rank) {
          CHECK(world.decode_events(rank).back() == fmt::format("landed {}", room));
        }
        CHECK(world.prefill_events(0).back() == fmt::format("landed {}", room));
        CHECK(world.prefill_events(1).back() == fmt::format("landed {}", room));
      }
      require_quiet(world);
    }
  }
}
