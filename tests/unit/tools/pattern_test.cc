#include "tools/engine/pattern.h"

#include <algorithm>
#include <random>
#include <vector>

#include <catch2/catch.hpp>

namespace kvferry {
namespace {

const PieceCoordinate kPiece{.room = 77, .layer = 3, .kind = BufferKind::kKey, .head = 5, .position = 1000};

std::vector<std::byte> filled(std::size_t size, std::uint64_t seed) {
  std::vector<std::byte> bytes(size);
  fill_pattern(bytes, seed);
  return bytes;
}

}  // namespace

TEST_CASE("a filled piece of any length checks clean") {
  for (std::size_t size = 0; size < 70; ++size) {
    const auto bytes = filled(size, piece_seed(kPiece));
    CHECK(check_pattern(bytes, piece_seed(kPiece)).differing == 0);
  }
}

TEST_CASE("filling writes nothing beyond the piece") {
  for (std::size_t size = 0; size < 40; ++size) {
    std::vector<std::byte> bytes(size + 16, std::byte{0xEE});
    fill_pattern(std::span(bytes).first(size), piece_seed(kPiece));
    const auto rest = std::span(bytes).subspan(size);
    CHECK(std::count(rest.begin(), rest.end(), std::byte{0xEE}) == 16);
  }
}

TEST_CASE("a flipped bit anywhere is found and located") {
  for (const std::size_t size : {1, 7, 8, 64, 1153}) {
    auto bytes = filled(size, piece_seed(kPiece));
    for (std::size_t bit = 0; bit < size * 8; ++bit) {
      const auto flip = std::byte{1} << static_cast<int>(bit % 8);
      bytes[bit / 8] ^= flip;
      const PatternCheck check = check_pattern(bytes, piece_seed(kPiece));
      REQUIRE(check.differing == 1);
      REQUIRE(check.first == bit / 8);
      REQUIRE(check.found == bytes[bit / 8]);
      REQUIRE((check.expected ^ flip) == check.found);
      bytes[bit / 8] ^= flip;
    }
  }
}

TEST_CASE("swapped rooms, layers, kinds, heads and positions are found in every word") {
  PieceCoordinate room = kPiece;
  room.room = 78;
  PieceCoordinate layer = kPiece;
  layer.layer = kPiece.head;
  layer.head = kPiece.layer;
  PieceCoordinate kind = kPiece;
  kind.kind = BufferKind::kValue;
  PieceCoordinate head = kPiece;
  head.head = 4;
  PieceCoordinate position = kPiece;
  position.position = 1001;
  const auto bytes = filled(256, piece_seed(kPiece));
  for (const auto& other : {room, layer, kind, head, position}) {
    const PatternCheck check = check_pattern(bytes, piece_seed(other));
    CHECK(check.first < 8);
    CHECK(check.differing > 200);
  }
}

TEST_CASE("a piece that is shifted by whole words is found") {
  const auto bytes = filled(264, piece_seed(kPiece));
  CHECK(check_pattern(std::span(bytes).subspan(8), piece_seed(kPiece)).differing > 200);
}

TEST_CASE("guard bytes differ by rank, buffer and row, and from every pattern") {
  const GuardCoordinate guard{.rank = 1, .buffer = 2, .row = 3};
  const auto bytes = filled(64, guard_seed(guard));
  CHECK(check_pattern(bytes, guard_seed(guard)).differing == 0);
  CHECK(check_pattern(bytes, guard_seed({.rank = 2, .buffer = 1, .row = 3})).differing > 0);
  CHECK(check_pattern(bytes, guard_seed({.rank = 1, .buffer = 2, .row = 4})).differing > 0);
  CHECK(check_pattern(bytes, aux_seed(1, 2)).differing > 0);
  CHECK(check_pattern(bytes, piece_seed({.room = 1, .layer = 2, .head = 0, .position = 3})).differing > 0);
}

TEST_CASE("no two of a million neighbouring pieces share a seed") {
  std::vector<std::uint64_t> seeds;
  for (std::uint32_t layer = 0; layer < 16; ++layer) {
    for (std::uint32_t head = 0; head < 16; ++head) {
      for (std::uint64_t position = 0; position < 4096; ++position) {
        seeds.push_back(piece_seed({.room = 9, .layer = layer, .head = head, .position = position}));
      }
    }
  }
  std::sort(seeds.begin(), seeds.end());
  CHECK(std::adjacent_find(seeds.begin(), seeds.end()) == seeds.end());
}

}  // namespace kvferry
