// The reference copies of kvferry bench against the engine's pattern, which knows nothing of plans.

#include <algorithm>
#include <array>
#include <set>

#include <catch2/catch.hpp>

#include "tools/cli/bench/bench_side.h"
#include "tools/cli/bench/copy_list.h"

namespace kvferry {
namespace {

struct Sides {
  DemoLayout layout;
  BenchSide prefill;
  BenchSide decode;
  std::vector<BenchRoom> rooms;
};

Sides make_sides(const char* model, const char* prefill, const char* decode, const BenchCell& cell,
                 std::uint32_t waves) {
  DemoOptions options;
  options.model_text = model;
  options.prefill = prefill;
  options.decode = decode;
  options.page_size = 8;
  auto layout = demo_layout(options);
  REQUIRE(layout);
  std::vector<BenchRoom> rooms = place_rooms(*layout, cell, waves);
  std::array<std::uint32_t, 2> pages{};
  for (const Side side : {Side::kPrefill, Side::kDecode}) {
    const auto i = static_cast<std::size_t>(side);
    pages[i] =
        rooms.back().first_page[i] + static_cast<std::uint32_t>(layout->pages_for(side, rooms.back().tokens));
  }
  auto from =
      BenchSide::create(*layout, Side::kPrefill, pages[0], static_cast<std::uint32_t>(rooms.size()), 1);
  auto to = BenchSide::create(*layout, Side::kDecode, pages[1], static_cast<std::uint32_t>(rooms.size()), 2);
  REQUIRE(from);
  REQUIRE(to);
  return {*layout, *std::move(from), *std::move(to), std::move(rooms)};
}

constexpr const char* kGqa =
    R"({"model_type": "gqa", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 8,
        "num_key_value_heads": 8, "head_dim": 8})";
constexpr const char* kMla =
    R"({"model_type": "mla", "num_hidden_layers": 3, "hidden_size": 64, "kv_lora_rank": 24, "qk_rope_head_dim": 8})";

}  // namespace

TEST_CASE("both copies of a cell's rows are what the engine expects, byte by byte") {
  struct Case {
    const char* model;
    const char* prefill;
    const char* decode;
  };
  const auto layouts =
      GENERATE(Case{kMla, "tp=1", "tp=1"}, Case{kMla, "tp=1", "tp=4,dcp=4"}, Case{kMla, "tp=1", "tp=8,dcp=8"},
               Case{kMla, "tp=2", "tp=1"}, Case{kGqa, "tp=1", "tp=1"}, Case{kGqa, "tp=4", "tp=8"},
               Case{kGqa, "tp=8", "tp=2"});
  // Rooms that end inside a page, and a larger one in each wave.
  Sides sides = make_sides(layouts.model, layouts.prefill, layouts.decode, {77, 3, 200}, 2);
  CAPTURE(layouts.prefill, layouts.decode);
  REQUIRE(sides.rooms.size() == 8);
  const auto list = CopyList::create(sides.layout, sides.prefill, sides.decode, sides.rooms);
  REQUIRE(list);
  CHECK(list->room_bytes().size() == sides.rooms.size());
  sides.prefill.fill(sides.rooms);
  const auto copy = GENERATE(0, 1, 3);
  sides.decode.poison(sides.rooms);
  const BenchCheck poisoned = sides.decode.check(sides.rooms);
  CHECK(poisoned.differing > list->bytes() / 100 * 90);
  CHECK_FALSE(poisoned.first.empty());
  if (copy == 0) {
    list->copy_with_memcpy();
  } else {
    list->copy_with_kernel(static_cast<unsigned>(copy));
  }
  const BenchCheck copied = sides.decode.check(sides.rooms);
  CHECK(copied.differing == 0);
  CHECK(copied.first.empty());
  CHECK(copied.compared == poisoned.compared);
}

TEST_CASE("one wrong byte is found and its place named") {
  Sides sides = make_sides(kMla, "tp=1", "tp=1", {64, 1}, 1);
  const auto list = CopyList::create(sides.layout, sides.prefill, sides.decode, sides.rooms);
  REQUIRE(list);
  sides.prefill.fill(sides.rooms);
  sides.decode.poison(sides.rooms);
  list->copy_with_memcpy();
  const BenchRank& rank = sides.decode.ranks().front();
  rank.memory.buffer(1)[100] ^= std::byte{1};
  const BenchCheck check = sides.decode.check(sides.rooms);
  CHECK(check.differing == 1);
  CHECK(check.first.starts_with("rank 0 layer 1 latent position "));
}

TEST_CASE("a page is one piece where both sides hold whole rows in order") {
  const Sides sides = make_sides(kMla, "tp=1", "tp=1", {64, 1}, 1);
  const auto list = CopyList::create(sides.layout, sides.prefill, sides.decode, sides.rooms);
  REQUIRE(list);
  // 64 tokens in pages of 8, in random order, in 3 layers; two neighbours by chance are one piece.
  CHECK(list->pieces() <= 3 * 8);
  CHECK(list->pieces() >= 3 * 2);
  CHECK(list->bytes() == 3u * 64 * 32 * 2);
}

TEST_CASE("no two rooms of a round share a page or a slot") {
  const Sides sides = make_sides(kMla, "tp=1", "tp=4,dcp=4", {40, 3, 100}, 4);
  std::set<std::uint32_t> slots;
  for (const BenchSide* side : {&sides.prefill, &sides.decode}) {
    for (const BenchRank& rank : side->ranks()) {
      std::set<std::uint32_t> pages;
      std::size_t count = 0;
      for (const BenchRoom& room : sides.rooms) {
        slots.insert(room.slot);
        for (const std::uint32_t page : side->pages(rank, room)) {
          pages.insert(page);
          ++count;
        }
      }
      CHECK(pages.size() == count);
    }
  }
  CHECK(slots.size() == sides.rooms.size());
}

}  // namespace kvferry
