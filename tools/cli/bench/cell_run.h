#pragma once
// The rounds of one cell: every fabric and the copies of the same rows, in turns, poisoned before and
// compared after each turn.

#include <cstdint>
#include <memory>
#include <vector>

#include "tools/cli/bench/bench_report.h"
#include "tools/cli/bench/copy_list.h"
#include "tools/cli/bench/wave.h"

namespace kvferry {

/// What the cells of a group share. Everything outlives the run of a cell.
struct CellContext {
  const DemoLayout& layout;
  BenchSide& prefill;
  BenchSide& decode;
  std::vector<std::unique_ptr<BenchLink>>& links;
  std::uint32_t rounds = 5;        // that count
  std::uint32_t copy_threads = 1;  // of the last copy
  Room& next_room;                 // the first number that no room has had
};

class CellRun {
 public:
  CellRun(const CellContext& context, const BenchCell& cell, std::uint32_t waves);

  /// One more round than count, which is discarded. kCorrupt names the first wrong byte.
  Result<void> run(CellResult& result);

 private:
  /// What is gathered of one fabric.
  struct Samples {
    std::vector<double> rates;
    std::vector<double> to_memcpy;  // over the memcpy before and after it
    std::vector<double> room_seconds;
    std::vector<double> room_seconds_alone;  // of a mixed cell
    std::vector<double> call_seconds;
    std::array<double, 2> cpu{};
    double writes = 0;
    std::uint64_t bytes = 0;
    std::uint64_t rooms = 0;
    std::uint64_t verified = 0;
  };
  /// Rates of the copies in the rounds that count, and those of the kernel over the memcpy before it.
  struct Copies {
    std::vector<double> memcpy;
    std::vector<double> kernel;
    std::vector<double> kernels;
    std::vector<double> kernel_to_memcpy;
    std::vector<double> kernels_to_memcpy;
  };

  Result<void> fabric_turn(BenchLink& link, const CopyList& list, bool counts, Samples& samples);
  Result<void> waves_turn(BenchLink& link, const CopyList& list, bool counts, bool alone, Samples& samples);
  Result<void> memcpy_turn(const CopyList& list, bool counts);
  Result<void> kernel_turn(const CopyList& list, bool counts);
  template <class Copy>
  Result<double> copy_once(const CopyList& list, const char* name, const Copy& copy);
  Result<std::uint64_t> verify(const std::string& who, std::span<const BenchRoom> rooms) const;
  FabricResult conclude(const std::string& fabric, const Samples& samples) const;

  CellContext context_;
  BenchCell cell_;
  std::uint32_t waves_;
  std::vector<BenchRoom> rooms_;
  Copies copies_;
  double last_memcpy_ = 0;  // rate
};

}  // namespace kvferry
