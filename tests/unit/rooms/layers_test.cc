// Chunks that go by groups of layers: what is accepted in which order, what is read, compared and reported,
// and what happens to a room that ends between two groups.
#include <algorithm>
#include <catch2/catch.hpp>

#include "tests/support/room_world.h"

using namespace kvferry;
using namespace kvferry::test;
using std::chrono::seconds;

namespace {

using Strings = std::vector<std::string>;

constexpr EngineId kPrefillEngine = 1;  // RoomWorld numbers its engines, prefill first

WorldSpec layered(std::uint32_t layers) {
  WorldSpec spec;
  spec.model = small_mla(layers);
  spec.prefill = tp(1);
  spec.decode = tp(1);
  spec.verify = kVerifyFull;
  return spec;
}

/// A model with everything that a rank can hold: layers 0 and 1 with recurrent state, 2 and 4 with all
/// tokens, 3 and 5 with a window, 6 of the draft model.
WorldSpec hybrid() {
  WorldSpec spec = layered(6);
  spec.model.state_layers = {0, 1};
  spec.model.state = {{BufferKind::kConv, 1, {8}, 4}, {BufferKind::kRecurrent, 1, {4}, 16}};
  spec.model.kv_layers = {2, 4};
  spec.model.sliding_layers = {3, 5};
  spec.model.sliding_window = 5;
  spec.model.draft_layers = 1;
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

/// Lands room 7 and checks that every rank heard of it once.
void require_landed(RoomWorld& world, const WorldSpec& spec) {
  world.run();
  for (RankIndex rank = 0; rank < spec.decode.rank_count(); ++rank) {
    CHECK(world.decode_events(rank) == Strings{"landed 7"});
  }
  for (RankIndex rank = 0; rank < spec.prefill.rank_count(); ++rank) {
    CHECK(world.prefill_events(rank) == Strings{"landed 7"});
  }
  require_quiet(world);
}

struct Group {
  std::vector<std::uint32_t> pages;
  std::uint64_t first = 0;
  std::uint64_t count = 0;
  std::uint32_t layer_begin = 0;
  std::uint32_t layer_end = 0;
  bool last = false;
};

EngineChunk chunk(const Group& group) {
  EngineChunk out;
  out.room = 7;
  out.pages = group.pages;
  out.first_token = group.first;
  out.token_count = group.count;
  out.layer_begin = group.layer_begin;
  out.layer_end = group.layer_end;
  out.last = group.last;
  return out;
}

}  // namespace

TEST_CASE(
    "a room lands by groups of layers, whoever comes first, and each group is reported when it was read") {
  for (const bool send_first : {true, false}) {
    const WorldSpec spec = layered(5);
    RoomWorld world(spec);
    world.connect();
    world.use(7);
    if (!send_first) {
      world.expect_all(7, 13);
    }
    world.send_all(7, 13, 8, 0, 2);
    if (send_first) {
      world.expect_all(7, 13);
    }
    require_landed(world, spec);
    CHECK(world.chunks_done(0) == Strings{"room 7 tokens 0 layers 2", "room 7 tokens 0 layers 4",
                                          "room 7 tokens 0 layers 5", "room 7 tokens 8 layers 2",
                                          "room 7 tokens 8 layers 4", "room 7 tokens 8 layers 5"});
    CHECK(world.bytes_posted == 13ull * 5 * spec.model.head_bytes(BufferKind::kLatent) + 128);
  }
}

TEST_CASE("chunks with all layers and chunks by layers follow each other as they come") {
  const WorldSpec spec = layered(3);
  RoomWorld world(spec);
  world.connect();
  world.use(7);
  world.expect_all(7, 10);
  REQUIRE(world.send(0, 7, 0, 4, false).has_value());
  REQUIRE(world.send_layers(0, 7, 4, 4, {0, 1}, false).has_value());
  REQUIRE(world.send_layers(0, 7, 4, 4, {1, 3}, false).has_value());
  REQUIRE(world.send(0, 7, 8, 2, true).has_value());
  require_landed(world, spec);
}

TEST_CASE("groups of tokens that decode has already move nothing and are read at once") {
  const WorldSpec spec = layered(3);
  RoomWorld world(spec);
  world.connect();
  world.use(7);
  world.expect_all(7, 9, 6);
  world.send_all(7, 9, 4, 0, 1);
  require_landed(world, spec);
  CHECK(world.bytes_posted == 3ull * 3 * spec.model.head_bytes(BufferKind::kLatent) + 128);
  REQUIRE(world.chunks_done(0).size() == 9);
  CHECK(world.chunks_done(0)[0] == "room 7 tokens 0 layers 1");
  CHECK(world.chunks_done(0)[8] == "room 7 tokens 8 layers 3");
}

TEST_CASE("what does not follow the groups before it is refused by name, and changes nothing") {
  const WorldSpec spec = layered(6);
  RoomWorld world(spec);
  world.connect();
  prefill::Actions actions;
  const auto send = [&](const Group& group) {
    return world.prefill.send(1, kPrefillEngine, chunk(group), 0, {}, actions);
  };
  const auto refused = [&](const Group& group, const char* text) {
    const auto before = world.prefill.stats();
    const auto sent = send(group);
    REQUIRE_FALSE(sent.has_value());
    CHECK(sent.error().code == Code::kInvalid);
    INFO(sent.error().message);
    CHECK(sent.error().message.find(text) != std::string::npos);
    CHECK(world.prefill.stats().live_pages == before.live_pages);
    CHECK(world.prefill.stats().rooms == before.rooms);
  };
  refused({{1, 2}, 0, 4, 2, 2}, "layer_begin 2 is not below layer_end 2");
  refused({{1, 2}, 0, 4, 3, 2}, "layer_begin 3 is not below layer_end 2");
  refused({{1, 2}, 0, 4, 0, 7}, "layer_end 7 is beyond this rank's layers 0 to 5; end the last group at 6");
  refused({{1, 2}, 0, 4, 1, 3}, "layer_begin is 1, but nothing of tokens 0 to 4 was sent before");
  refused({{1, 2}, 0, 4, 0, 2, true}, "last is set on layers up to 2, but this rank's end at 6");
  REQUIRE(send({{1, 2}, 0, 4, 0, 2}).has_value());
  CHECK(world.prefill.stats().live_pages == 2);
  const char* where = "tokens 0 to 4 were sent up to layer 2, go on with layer_begin 2";
  for (const auto& [given, text] : std::vector<std::pair<Group, const char*>>{
           {{{1, 2}, 0, 4, 3, 6}, "layer_begin is 3, which would leave a gap"},
           {{{1, 2}, 0, 4, 1, 4}, "layer_begin is 1, which would repeat layers"},
           {{{1, 2}, 0, 4, 0, 2}, "layer_begin is 0, which would repeat layers"},
           {{{1, 3}, 0, 4, 2, 4}, "pages[1] is 3, but was 2"},
           {{{1}, 0, 2, 2, 4}, "token_count is 2, but was 4"},
           {{{3, 4}, 4, 4, 0, 2}, "first_token is 4, but layers of tokens from 0 on are missing"},
           {{{1, 2}, 0, 4, 0, 0}, "layer_begin and layer_end are 0 (all layers), but some were sent"}}) {
    refused(given, text);
    refused(given, where);
  }
  REQUIRE(send({{1, 2}, 0, 4, 2, 6}).has_value());
  CHECK(world.prefill.stats().live_pages == 2);  // the groups name the same pages
  refused({{3, 4}, 4, 4, 1, 6}, "layer_begin is 1, but nothing of tokens 4 to 8 was sent before");
  refused({{5}, 8, 2, 0, 6}, "first_token is 8, the chunks so far end at 4");
  const auto repeated = send({{1, 2}, 0, 4, 0, 2});
  REQUIRE_FALSE(repeated.has_value());
  CHECK(repeated.error().code == Code::kConflict);
  REQUIRE(send({{3, 4}, 4, 3, 0, 6 - 1}).has_value());  // only the last group knows that it is the last
  refused({{3, 4}, 4, 3, 5, 6}, "only the last chunk may end inside a page");
  REQUIRE(send({{3, 4}, 4, 3, 5, 6, true}).has_value());
  CHECK(world.prefill.stats().live_pages == 4);
}

TEST_CASE("each group of layers counts as a chunk of the limit") {
  WorldSpec spec = layered(4);
  spec.chunks_per_room_max = 3;
  RoomWorld world(spec);
  world.use(7);
  for (std::uint64_t layer = 0; layer < 3; ++layer) {
    REQUIRE(world.send_layers(0, 7, 0, 4, {layer, layer + 1}, false).has_value());
  }
  const auto fourth = world.send_layers(0, 7, 0, 4, {3, 4}, true);
  REQUIRE_FALSE(fourth.has_value());
  CHECK(fourth.error().code == Code::kExhausted);
  CHECK(fourth.error().message.find("limits.chunks_per_room is 3") != std::string::npos);
}

TEST_CASE("a stage that begins at layer 30 sends its own layers, and a group without any is refused") {
  WorldSpec spec = layered(61);
  spec.model.latent_dim = 16;
  spec.model.rope_dim = 16;
  spec.prefill.pp = 2;
  spec.prefill.pp_layers = {30, 31};
  RoomWorld world(spec);
  world.connect();
  world.use(7);
  world.expect_all(7, 7);
  const auto refused = [&](const Interval& layers, const char* text) {
    const auto sent = world.send_layers(1, 7, 0, 7, layers, false);
    REQUIRE_FALSE(sent.has_value());
    INFO(sent.error().message);
    CHECK(sent.error().message.find(text) != std::string::npos);
  };
  refused({0, 30}, "layers 0 to 29 hold none of this rank, whose next one is 30");
  refused({31, 60}, "begin at this rank's first layer, 30");
  REQUIRE(world.send_layers(1, 7, 0, 7, {28, 45}, false).has_value());  // at or below the first layer
  REQUIRE(world.send_layers(1, 7, 0, 7, {45, 61}, true).has_value());
  for (std::uint64_t layer = 0; layer < 30; layer += 10) {
    REQUIRE(world.send_layers(0, 7, 0, 7, {layer, layer + 10}, layer == 20).has_value());
  }
  require_landed(world, spec);
  CHECK(world.chunks_done(1) == Strings{"room 7 tokens 0 layers 45", "room 7 tokens 0 layers 61"});
}

TEST_CASE("state and windows go with the group that completes the last tokens, draft layers by their ids") {
  for (const std::uint32_t group : {1u, 2u, 3u, 5u, 7u}) {
    for (const std::uint64_t prefix : {0u, 4u}) {
      WorldSpec spec = hybrid();
      RoomWorld world(spec);
      world.connect();
      world.use(7);
      world.expect_all(7, 11, prefix);
      world.send_all(7, 11, 4, prefix, group);
      require_landed(world, spec);
      RoomWorld whole(spec);
      whole.connect();
      whole.use(7);
      whole.expect_all(7, 11, prefix);
      whole.send_all(7, 11, 4, prefix);
      require_landed(whole, spec);
      CHECK(world.bytes_posted == whole.bytes_posted);
      CHECK(world.landed_pools(0) == whole.landed_pools(0));
      REQUIRE(world.digests.size() == 1);
      CHECK(world.digests == whole.digests);
      CHECK(world.digests.begin()->second.layers == std::vector<std::uint32_t>{0, 1, 2, 3, 4, 5, 6});
    }
  }
}

TEST_CASE("a group waits for its own fence and for those before it, and pages count until all are read") {
  const WorldSpec spec = layered(3);
  RoomWorld world(spec);
  world.connect();
  world.use(7);
  world.expect_all(7, 4);
  world.run();
  prefill::Actions actions;
  const auto posts = [&] {
    const auto count = std::count_if(actions.begin(), actions.end(), [](const prefill::Action& action) {
      return std::holds_alternative<prefill::PostChunk>(action);
    });
    actions.clear();
    return count;
  };
  REQUIRE(world.prefill.send(1, kPrefillEngine, chunk({{5, 6}, 0, 4, 0, 1}), 11, {}, actions).has_value());
  REQUIRE(world.prefill.send(1, kPrefillEngine, chunk({{5, 6}, 0, 4, 1, 2}), 12, {}, actions).has_value());
  REQUIRE(world.prefill.send(1, kPrefillEngine, chunk({{5, 6}, 0, 4, 2, 3}), 13, {}, actions).has_value());
  CHECK(posts() == 0);
  world.prefill.chunk_ready(1, kPrefillEngine, 7, 12, actions);
  CHECK(posts() == 0);
  world.prefill.chunk_ready(1, kPrefillEngine, 7, 11, actions);
  CHECK(posts() == 2);
  world.prefill.chunk_ready(1, kPrefillEngine, 7, 13, actions);
  CHECK(posts() == 1);
  CHECK(world.prefill.stats().live_pages == 2);
}

TEST_CASE("an abort between two groups ends the room on both sides, and the next use begins anew") {
  for (const bool one_sided : {false, true}) {
    for (const bool by_prefill : {true, false}) {
      WorldSpec spec = layered(4);
      spec.one_sided = one_sided;
      RoomWorld world(spec);
      world.connect();
      world.use(7);
      world.expect_all(7, 8);
      REQUIRE(world.send_layers(0, 7, 0, 8, {0, 2}, false).has_value());
      Rng rng(test_seed(5));
      for (int i = 0; i < 4; ++i) {
        world.step(rng);
      }
      CHECK((by_prefill ? world.abort_prefill(0, 7) : world.abort_decode(0, 7)).has_value());
      world.run();
      CHECK(world.decode_events(0) == Strings{"aborted 7"});
      CHECK(world.prefill_events(0) == Strings{"aborted 7"});
      require_quiet(world);
      world.use(7);
      world.expect_all(7, 8);
      world.run();
      world.send_all(7, 8, 8, 0, 3);
      world.run();
      CHECK(world.decode_events(0) == Strings{"aborted 7", "landed 7"});
      require_quiet(world);
    }
  }
}

TEST_CASE("a group that crosses the end of its room is told so, not that its layers are wrong") {
  const WorldSpec spec = layered(4);
  RoomWorld world(spec);
  world.connect();
  world.use(7);
  world.expect_all(7, 8);
  REQUIRE(world.send_layers(0, 7, 0, 8, {0, 2}, false).has_value());
  REQUIRE(world.abort_decode(0, 7).has_value());
  world.run();
  EngineChunk late = chunk({{1, 2, 3, 4}, 0, 8, 2, 4, true});
  late.begun = true;
  prefill::Actions actions;
  const auto sent = world.prefill.send(1, kPrefillEngine, std::move(late), 0, {}, actions);
  REQUIRE_FALSE(sent.has_value());
  CHECK(sent.error().code == Code::kAborted);
  CHECK(sent.error().message.find("its final event is on the way") != std::string::npos);
}

TEST_CASE("a connection that is lost between two groups fails the room, and pages come back") {
  for (const bool one_sided : {false, true}) {
    WorldSpec spec = layered(4);
    spec.one_sided = one_sided;
    spec.decode = tp(2, 2);
    RoomWorld world(spec);
    world.connect();
    world.use(7);
    world.expect_all(7, 8);
    REQUIRE(world.send_layers(0, 7, 0, 8, {0, 2}, false).has_value());
    Rng rng(test_seed(6));
    for (int i = 0; i < 6; ++i) {
      world.step(rng);
    }
    world.lose_connection();
    world.run();
    CHECK(world.decode_events(0) == Strings{"failed 7 peer_lost"});
    CHECK(world.decode_events(1) == Strings{"failed 7 peer_lost"});
    world.advance(seconds(301));
    world.run();
    CHECK(world.prefill_events(0).size() == 1);
    require_quiet(world);
  }
}
