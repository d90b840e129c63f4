#pragma once
// One run of the bench: group by group, all fabrics' daemons at once, cell by cell in interleaved rounds.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tools/cli/bench/bench_link.h"
#include "tools/cli/bench/bench_options.h"
#include "tools/cli/bench/bench_report.h"
#include "tools/cli/bench/bench_side.h"

namespace kvferry {

/// Who watches a run.
struct BenchWatcher {
  std::function<void(const std::string&)> doing;  // what is measured now
  std::function<void(const CellResult&)> done;
};

/// One group: its daemons, pools and cells.
class BenchGroupRun {
 public:
  BenchGroupRun(const BenchOptions& options, const std::filesystem::path& program_directory,
                std::size_t group, BenchReport& report, const BenchWatcher& watcher)
      : options_(options),
        program_directory_(program_directory),
        group_(group),
        report_(report),
        watcher_(watcher) {}

  /// Appends to the report. An error is a daemon or a room that failed: the run is over.
  Result<void> run();

 private:
  struct FittingCell {
    BenchCell cell;
    std::uint32_t waves = 0;
  };
  Result<std::vector<FittingCell>> fit_cells(PoolSizes& pools, std::uint32_t& slots);
  Result<void> start(const PoolSizes& pools, std::uint32_t slots);
  Result<void> warm_up(std::uint64_t tokens);
  Result<void> measure_cell(const FittingCell& cell);
  Result<void> note_daemons();
  Result<void> stop();
  DemoOptions cluster_options(const std::string& fabric) const;
  const BenchGroup& group() const { return report_.matrix.groups[group_]; }

  const BenchOptions& options_;
  const std::filesystem::path& program_directory_;
  std::size_t group_;
  BenchReport& report_;
  const BenchWatcher& watcher_;
  DemoLayout layout_;
  std::unique_ptr<BenchSide> prefill_;
  std::unique_ptr<BenchSide> decode_;
  std::vector<std::unique_ptr<BenchLink>> links_;
  std::vector<std::string> carries_;  // of links_
  std::uint32_t copy_threads_ = 1;    // that shm has
  Room next_room_ = 1;
};

}  // namespace kvferry
