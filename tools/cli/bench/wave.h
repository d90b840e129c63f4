#pragma once
// One timed wave: rooms that move at once. Decode expects all of them and prefill names all of their pages,
// held back by one fence (kvf_chunk.ready_fd); the clock starts when the fence opens, after every prefill
// rank was told of every grant. So it measures from ready pages to the landings at the decode engines, and
// neither side's calls. The engines sleep in poll(2) while nothing comes.

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "common/base/ids.h"
#include "common/base/result.h"
#include "tools/cli/bench/bench_link.h"
#include "tools/cli/bench/bench_side.h"

namespace kvferry {

struct WaveTimes {
  double seconds = 0;                // from the fence to the last landing
  std::vector<double> room_seconds;  // and of each room: to its landing on all decode ranks
  std::vector<double> call_seconds;  // what each kvf_send took, before
  std::uint64_t bytes = 0;           // that the decode daemons say have landed, aux rows included
  std::array<double, 2> cpu{};       // seconds of the daemon of each side in that time
};

/// Runs the rooms under the numbers first_number, first_number + 1, ... Their source rows must be filled. On
/// success every room has landed on both sides, and its aux row was compared. Errors name the room, and are
/// final: the link must be given up.
Result<WaveTimes> run_wave(BenchLink& link, const DemoLayout& layout, const BenchSide& prefill,
                           const BenchSide& decode, std::span<const BenchRoom> rooms, Room first_number);

}  // namespace kvferry
