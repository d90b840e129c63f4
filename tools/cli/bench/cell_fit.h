#pragma once
// Whether a cell fits into the memory, and how often it is repeated in one round: small ones often enough
// that a round moves more than the caches hold and every repetition finds cold pages. Pure.

#include <cstdint>

#include "tools/cli/bench/bench_matrix.h"
#include "tools/cli/demo/demo_options.h"

namespace kvferry {

/// At most so many rooms have pages (and aux rows) of their own in one round, unless a wave has more.
inline constexpr std::uint32_t kRoomsPerRoundMax = 512;

struct CellFit {
  std::uint32_t waves = 0;         // how often the rooms of the cell run in one round; 0: it does not fit
  std::uint64_t tokens = 0;        // that the pools of either side hold for them
  std::uint64_t needed_bytes = 0;  // of both sides' pools, for one wave
};

/// `budget` and `batch_bytes` in bytes; the first is for the pools of both sides, the second for what a round
/// is to move.
Result<CellFit> fit_cell(const DemoLayout& layout, const BenchCell& cell, std::uint64_t budget,
                         std::uint64_t batch_bytes);

}  // namespace kvferry
