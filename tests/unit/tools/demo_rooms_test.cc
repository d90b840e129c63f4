#include "tools/cli/demo/demo_rooms.h"

#include <set>

#include <catch2/catch.hpp>

namespace kvferry {
namespace {

DemoLayout layout_of(const char* model, const char* prefill, const char* decode) {
  DemoOptions options;
  options.model = model;
  options.prefill = prefill;
  options.decode = decode;
  auto layout = demo_layout(options);
  REQUIRE(layout);
  return *layout;
}

nlohmann::json landed(Room room) {
  return {{"event", "landed"}, {"room", room},  {"bytes", 10},    {"transfer_ns", 1000},
          {"at_ns", 5000},     {"payload", 10}, {"verified", 20}, {"mismatches", 0}};
}

}  // namespace

TEST_CASE(
    "a prefix hit is rounded down to whole pages of both sides, and a request is clipped to the pools") {
  const TraceRequest request{0, 1000, 1, {}};
  Admission admission = admit(request, 600, 256, 10'000);
  CHECK(admission.prefix == 512);
  CHECK(admission.tokens == 1000);
  CHECK_FALSE(admission.clipped);
  admission = admit(request, 0, 256, 512);
  CHECK(admission.tokens == 512);
  CHECK(admission.clipped);
  admission = admit({0, 1024, 1, {}}, 1024, 256, 512);
  CHECK(admission.prefix == 1024);
  CHECK(admission.tokens == 1024);
  CHECK_FALSE(admission.clipped);
}

TEST_CASE("the default decode layout uses context parallelism only where the cache allows it") {
  CHECK(layout_of("deepseek-v3", "tp=2", "").decode.dcp == 4);
  CHECK(layout_of("llama-3.1-8b", "tp=2", "").decode.dcp == 1);
  CHECK(layout_of("deepseek-v3", "tp=2", "").unit_tokens() == 256);
}

TEST_CASE("pools never exceed the memory that is given, nor what is wanted") {
  const DemoLayout layout = layout_of("deepseek-v3", "tp=2", "tp=4,dcp=4");
  // 61 layers of 1,152 bytes: twice on prefill, once over the decode ranks.
  const std::uint64_t unit_bytes = 256ull * 61 * 1152 * 3;
  auto pools = pool_sizes(layout, 1'000'000, unit_bytes * 7 + 5);
  REQUIRE(pools);
  CHECK(pools->tokens == 7 * 256);
  CHECK(pools->prefill_pages == 7 * 4);
  CHECK(pools->decode_pages == 7);
  CHECK(pools->bytes == unit_bytes * 7);
  pools = pool_sizes(layout, 300, unit_bytes * 7);
  REQUIRE(pools);
  CHECK(pools->tokens == 512);
  const auto none = pool_sizes(layout, 300, unit_bytes - 1);
  REQUIRE_FALSE(none);
  CHECK(none.error().message.find("--memory") != std::string::npos);
}

TEST_CASE("rooms have distinct legal ids, and their pages are reserved until they are closed") {
  const DemoLayout layout = layout_of("deepseek-v3", "tp=2", "tp=4,dcp=4");
  const auto pools = pool_sizes(layout, 2048, 1ull << 40);
  REQUIRE(pools);
  DemoRooms rooms(layout, *pools, 3);
  std::set<Room> seen;
  for (int round = 0; round < 1000; ++round) {
    const auto first = rooms.open(1024, 0);
    const auto second = rooms.open(1024 + 4096, 4096);
    REQUIRE(first);
    REQUIRE(second);
    CHECK_FALSE(rooms.open(1, 0));
    for (const Room room : {*first, *second}) {
      CHECK(room_is_legal(room));
      CHECK(seen.insert(room).second);
      rooms.close(room);
    }
  }
}

TEST_CASE("a room has ended when both sides have said so, and what they say later changes nothing") {
  const DemoLayout layout = layout_of("deepseek-v3", "tp=2", "tp=4,dcp=4");
  const auto pools = pool_sizes(layout, 2048, 1ull << 40);
  REQUIRE(pools);
  DemoRooms rooms(layout, *pools, 3);
  const auto room = rooms.open(1024, 0);
  REQUIRE(room);
  CHECK_FALSE(rooms.on_event(Side::kPrefill, {{"event", "started"}, {"room", *room}}, Instant{}));
  CHECK_FALSE(rooms.at(*room).transfers());
  CHECK_FALSE(rooms.on_event(Side::kDecode, {{"event", "expected"}, {"room", *room}}, Instant{}));
  CHECK_FALSE(rooms.at(*room).transfers());
  CHECK_FALSE(rooms.on_event(Side::kPrefill, {{"event", "granted"}, {"room", *room}}, Instant{}));
  CHECK(rooms.at(*room).transfers());
  CHECK_FALSE(rooms.on_event(Side::kPrefill, landed(*room), Instant{}));
  CHECK_FALSE(rooms.on_event(Side::kPrefill, {{"event", "failed"}, {"room", *room}}, Instant{}));
  CHECK_FALSE(rooms.on_event(Side::kDecode, landed(*room + 2), Instant{}));
  CHECK(rooms.on_event(Side::kDecode, landed(*room), Instant{}) == room);
  CHECK(rooms.at(*room).endings[0]->landed);
  DemoResults results;
  rooms.account(rooms.at(*room), results);
  CHECK(results.landed == 1);
  CHECK(results.bytes == 10);
}

TEST_CASE("active time counts overlapping transfers once") {
  CHECK(union_ns({}) == 0);
  CHECK(union_ns({{10, 20}, {0, 5}, {15, 30}, {16, 17}, {30, 31}}) == 26);
}

TEST_CASE("percentiles are samples, by nearest rank") {
  CHECK(percentile({}, 0.5) == 0);
  CHECK(percentile({3, 1, 2}, 0.5) == 2);
  CHECK(percentile({3, 1, 2}, 0.99) == 3);
  CHECK(percentile({4}, 0.01) == 4);
}

TEST_CASE("a mismatch is told with room, layer, position, rank and head") {
  const nlohmann::json event{{"mismatches", 1},
                             {"first",
                              {{"rank", 2},
                               {"layer", 7},
                               {"kind", "latent"},
                               {"head", 0},
                               {"position", 123},
                               {"page", 4},
                               {"slot", 5},
                               {"byte", 6},
                               {"expected", 0x12},
                               {"found", 0x02}}}};
  const std::string text = describe_mismatch(99, event);
  CHECK(text.find("MISMATCH room 99 layer 7 latent position 123 rank 2 head 0") == 0);
  CHECK(text.find("must be 0x12 and is 0x02") != std::string::npos);
}

}  // namespace kvferry
