#pragma once
// The bytes that the synthetic engine puts into pools, and the check for them. Every piece (one head of one
// token of one buffer) is a counter-mode stream: word i of the piece is seed + i * odd constant, and the seed
// is a 64-bit mix of the piece's coordinates. Pieces of different coordinates therefore differ in (almost)
// every word, each head can be checked without its row, and both fill and check run at memory speed.
// Pure functions, any thread.

#include <cstddef>
#include <cstdint>
#include <span>

#include "common/base/ids.h"
#include "common/model/geometry.h"

namespace kvferry {

struct PieceCoordinate {
  Room room = 0;
  std::uint32_t layer = 0;
  BufferKind kind = BufferKind::kLatent;
  std::uint32_t head = 0;      // global KV head id
  std::uint64_t position = 0;  // token of the request
};

std::uint64_t piece_seed(const PieceCoordinate& piece);

/// Bytes that nobody may write: different for every row of every buffer of every rank, so that guard bytes
/// copied from elsewhere are found too.
struct GuardCoordinate {
  RankIndex rank = 0;
  std::uint32_t buffer = 0;
  std::uint64_t row = 0;  // in the pool
};
std::uint64_t guard_seed(const GuardCoordinate& guard);

/// Content of one aux field of a room; `field` is its index in the engine's schema.
std::uint64_t aux_seed(Room room, std::uint32_t field);

void fill_pattern(std::span<std::byte> out, std::uint64_t seed);

struct PatternCheck {
  std::uint64_t differing = 0;  // bytes
  std::uint64_t first = 0;      // offset of the first differing byte; meaningless when differing == 0
  std::byte expected{};         // at `first`
  std::byte found{};
};
PatternCheck check_pattern(std::span<const std::byte> bytes, std::uint64_t seed);

}  // namespace kvferry
