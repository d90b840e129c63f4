#pragma once
// The engine of one side: the ranks' rows and memory, which every pair of daemons is given, and the rooms
// that a cell places in them. The bytes of a room are those of its slot and not of its number, so that the
// source is filled once for each cell, however often its rooms run under new numbers.

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/base/result.h"
#include "tools/cli/bench/bench_matrix.h"
#include "tools/cli/demo/demo_options.h"
#include "tools/engine/rank_memory.h"
#include "tools/engine/rank_rows.h"

namespace kvferry {

struct BenchRoom {
  std::uint32_t slot = 0;  // of its own in the round: aux row, and what its bytes are made of
  std::uint64_t tokens = 0;
  std::array<std::uint32_t, 2> first_page{};  // into the page order of each rank of that side
};

/// The rooms of `waves` waves after each other, no two in the same pages. In a wave the room of cell.beside
/// comes first.
std::vector<BenchRoom> place_rooms(const DemoLayout& layout, const BenchCell& cell, std::uint32_t waves);

struct BenchCheck {
  std::uint64_t compared = 0;   // bytes
  std::uint64_t differing = 0;  // bytes
  std::string first;            // where; empty without differences
};

struct BenchRank {
  RankRows rows;
  RankMemory memory;
  RankCoord coord;
  std::vector<std::uint32_t> order;  // every page once, in random order
};

class BenchSide {
 public:
  /// Pools of `pages` pages on every rank, and `slots` aux rows.
  static Result<BenchSide> create(const DemoLayout& layout, Side side, std::uint32_t pages,
                                  std::uint32_t slots, std::uint64_t seed);

  Side side() const { return side_; }
  std::uint32_t page_size() const { return page_size_; }
  std::span<BenchRank> ranks() { return ranks_; }
  std::span<const BenchRank> ranks() const { return ranks_; }
  std::span<const std::uint32_t> pages(const BenchRank& rank, const BenchRoom& room) const;

  /// Writes the rooms' bytes into their rows.
  void fill(std::span<const BenchRoom> rooms);
  /// Makes every byte of the rooms' pages one that is wrong for them, and clears their aux rows.
  void poison(std::span<const BenchRoom> rooms);
  /// Compares every byte of the rooms' pages.
  BenchCheck check(std::span<const BenchRoom> rooms) const;

 private:
  BenchSide(Side side, std::uint32_t page_size) : side_(side), page_size_(page_size) {}
  RoomRows rows(const BenchRank& rank, const BenchRoom& room) const;
  /// `work(rank, buffer)` for each buffer of each rank, on all cores.
  template <class Work>
  void for_each_buffer(const Work& work) const;

  Side side_;
  std::uint32_t page_size_;
  std::vector<BenchRank> ranks_;
};

}  // namespace kvferry
