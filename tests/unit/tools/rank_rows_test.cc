#include "tools/engine/rank_rows.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include <catch2/catch.hpp>

#include "common/base/narrow.h"

namespace kvferry {
namespace {

// Small stand-ins with the shape of the real models: enough layers and heads for every kind of ownership.
ModelGeometry small_model(AttentionKind attention) {
  ModelGeometry model;
  model.name = "small";
  model.attention = attention;
  model.hidden_layers = 4;
  model.kv_layers = {0, 1, 2, 3};
  model.kv_heads = attention == AttentionKind::kMla ? 1 : 4;
  model.head_dim = 8;
  model.v_head_dim = 8;
  model.latent_dim = 24;
  model.rope_dim = 8;
  model.hidden_size = 64;
  return model;
}

struct Side {
  RankRows rows;
  std::vector<std::vector<std::byte>> memory;
  std::vector<std::uint32_t> pages;
};

// One rank with `count` of its 32 pages in a shuffled order.
Side make_side(const ModelGeometry& model, const Topology& topology, RankIndex rank, std::uint64_t first,
               std::uint64_t end, std::mt19937_64& random) {
  auto rows = RankRows::create(model, topology, rank, 4, 32);
  REQUIRE(rows);
  Side side{*std::move(rows), {}, std::vector<std::uint32_t>(32)};
  for (std::uint32_t i = 0; i < side.rows.buffers().size(); ++i) {
    side.memory.emplace_back(side.rows.buffer_bytes(i));
  }
  std::iota(side.pages.begin(), side.pages.end(), 0u);
  std::shuffle(side.pages.begin(), side.pages.end(), random);
  side.pages.resize(side.rows.pages_for(first, end));
  return side;
}

// Filled as a landing would leave it: guard everywhere, then the room's rows.
void land(Side& side, const RoomRows& rows) {
  for (std::uint32_t i = 0; i < side.memory.size(); ++i) {
    side.rows.fill_guard(side.memory[i], i, rows);
    side.rows.fill(side.memory[i], i, rows, {rows.first, rows.end});
  }
}

struct Found {
  std::uint64_t compared = 0;
  std::uint64_t payload = 0;
  std::uint64_t differing = 0;
  std::vector<Mismatch> first;
};

Found check_all(const Side& side, const RoomRows& rows) {
  Found found;
  for (std::uint32_t i = 0; i < side.memory.size(); ++i) {
    const RowReport report = side.rows.check(side.memory[i], i, rows);
    found.compared += report.compared;
    found.payload += report.payload;
    found.differing += report.differing;
    found.first.insert(found.first.end(), report.first.begin(), report.first.end());
  }
  return found;
}

}  // namespace

TEST_CASE("what is filled checks clean, and every byte of the pages is compared, for any ownership") {
  const std::uint64_t seed = std::random_device{}();
  INFO("seed " << seed);
  std::mt19937_64 random(seed);
  for (const auto attention : {AttentionKind::kMha, AttentionKind::kMla}) {
    const ModelGeometry model = small_model(attention);
    for (const char* text : {"tp=1", "tp=2", "tp=8", "tp=2,pp=2", "tp=4,dcp=4", "tp=4,dcp=2"}) {
      const auto topology = parse_topology(text);
      REQUIRE(topology);
      if (topology->dcp > 1 && attention == AttentionKind::kMha) {
        continue;  // heads and tokens are never both split
      }
      const std::uint64_t first = std::uint64_t{4} * topology->dcp;
      const std::uint64_t end = first + 1 + random() % 21;
      std::uint64_t payload = 0;
      for (RankIndex rank = 0; rank < topology->rank_count(); ++rank) {
        Side side = make_side(model, *topology, rank, first, end, random);
        const RoomRows rows{.room = 5, .first = first, .end = end, .pages = side.pages};
        land(side, rows);
        const Found found = check_all(side, rows);
        CHECK(found.differing == 0);
        std::uint64_t bytes = 0;
        for (const BufferShape& shape : side.rows.buffers()) {
          bytes += std::uint64_t{shape.row_bytes} * 4 * side.pages.size();
        }
        CHECK(found.compared == bytes);
        payload += found.payload;
      }
      // Every byte of every token is somewhere, on each of the ranks that replicate it.
      CHECK(payload >= (end - first) * model.bytes_per_token());
    }
  }
}

TEST_CASE("one wrong bit in a row is found and named by layer, head and position") {
  std::mt19937_64 random(11);
  const ModelGeometry model = small_model(AttentionKind::kMha);
  const auto topology = parse_topology("tp=2");
  REQUIRE(topology);
  Side side = make_side(model, *topology, 1, 0, 10, random);
  const RoomRows rows{.room = 5, .first = 0, .end = 10, .pages = side.pages};
  land(side, rows);
  // Buffer 6: the values of layer 2. Rank 1 of 2 owns heads 2 and 3.
  REQUIRE(side.rows.buffers()[6].layer == 2);
  REQUIRE(side.rows.buffers()[6].kind == BufferKind::kValue);
  CHECK_FALSE(side.rows.corrupt(side.memory[6], 6, rows, 9, 1, 0));
  CHECK_FALSE(side.rows.corrupt(side.memory[6], 6, rows, 10, 3, 0));
  REQUIRE(side.rows.corrupt(side.memory[6], 6, rows, 9, 3, 5));
  const Found found = check_all(side, rows);
  CHECK(found.differing == 1);
  REQUIRE(found.first.size() == 1);
  const Mismatch& mismatch = found.first.front();
  CHECK_FALSE(mismatch.guard);
  CHECK(mismatch.rank == 1);
  CHECK(mismatch.layer == 2);
  CHECK(mismatch.kind == BufferKind::kValue);
  CHECK(mismatch.head == 3);
  CHECK(mismatch.position == 9);
  CHECK(mismatch.byte == 5);
  CHECK(mismatch.page == side.pages[2]);
  CHECK(mismatch.slot == 1);
}

TEST_CASE("a byte written behind the last token, or into another rank's token, is found as a guard row") {
  std::mt19937_64 random(12);
  const ModelGeometry model = small_model(AttentionKind::kMla);
  const auto topology = parse_topology("tp=4,dcp=4");
  REQUIRE(topology);
  // 18 tokens over 4 DCP ranks: rank 3 owns 3, 7, 11, 15, and the second page has none of its rows.
  Side side = make_side(model, *topology, 3, 0, 18, random);
  REQUIRE(side.pages.size() == 2);
  const RoomRows rows{.room = 5, .first = 0, .end = 18, .pages = side.pages};
  land(side, rows);
  const std::uint64_t row = std::uint64_t{side.pages[1]} * 4 + 2;
  side.memory[1][row * side.rows.buffers()[1].row_bytes + 7] ^= std::byte{1};
  const Found found = check_all(side, rows);
  CHECK(found.differing == 1);
  REQUIRE(found.first.size() == 1);
  CHECK(found.first.front().guard);
  CHECK(found.first.front().layer == 1);
  CHECK(found.first.front().page == side.pages[1]);
  CHECK(found.first.front().slot == 2);
  CHECK(found.first.front().byte == 7);
}

TEST_CASE("rows of the wrong room, of the next token, or of a swapped page are found") {
  std::mt19937_64 random(13);
  const ModelGeometry model = small_model(AttentionKind::kMla);
  const Topology topology;
  Side side = make_side(model, topology, 0, 0, 16, random);
  const RoomRows rows{.room = 5, .first = 0, .end = 16, .pages = side.pages};
  land(side, rows);
  RoomRows other = rows;
  other.room = 6;
  CHECK(check_all(side, other).differing > 0);
  auto swapped = side.pages;
  std::swap(swapped[0], swapped[1]);
  other = rows;
  other.pages = swapped;
  CHECK(check_all(side, other).differing > 0);
  for (std::uint32_t i = 0; i < side.memory.size(); ++i) {
    side.rows.fill(side.memory[i], i, {.room = 5, .first = 0, .end = 16, .pages = side.pages}, {0, 16});
    const std::uint32_t bytes = side.rows.buffers()[i].row_bytes;
    auto* row = side.memory[i].data() + std::uint64_t{side.pages[0]} * 4 * bytes;
    std::swap_ranges(row, row + bytes, row + bytes);
  }
  CHECK(check_all(side, rows).first.size() == side.memory.size());
}

TEST_CASE("filling chunk by chunk gives the same bytes as filling at once") {
  std::mt19937_64 random(14);
  const ModelGeometry model = small_model(AttentionKind::kMla);
  const auto topology = parse_topology("tp=2,dcp=2");
  REQUIRE(topology);
  Side side = make_side(model, *topology, 1, 8, 37, random);
  const RoomRows rows{.room = 5, .first = 8, .end = 37, .pages = side.pages};
  for (std::uint32_t i = 0; i < side.memory.size(); ++i) {
    side.rows.fill_guard(side.memory[i], i, rows);
    for (std::uint64_t begin = 8; begin < 37; begin += 8) {
      side.rows.fill(side.memory[i], i, rows, {begin, std::min<std::uint64_t>(begin + 8, 37)});
    }
  }
  CHECK(check_all(side, rows).differing == 0);
}

}  // namespace kvferry
