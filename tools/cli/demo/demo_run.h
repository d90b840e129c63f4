#pragma once
// One run of the demo, from the measurement of memcpy to the table: the part of a router that both engines
// need (it names rooms, and says who prefills and who decodes), and the judge of what comes back.

#include <cstdint>
#include <deque>
#include <filesystem>
#include <memory>
#include <optional>
#include <vector>

#include "tools/cli/demo/demo_cluster.h"
#include "tools/cli/demo/demo_rooms.h"
#include "tools/cli/demo/progress.h"

namespace kvferry {

/// Runs the demo and prints it. Returns the exit status: 0, or 1 on any mismatch, failure or leak.
int run_demo(const DemoOptions& options, const std::filesystem::path& program_directory);

class DemoRun {
 public:
  DemoRun(const DemoOptions& options, DemoLayout layout, std::vector<TraceRequest> trace, PoolSizes pools,
          DemoResults& results);

  /// Everything between the start and the end of the processes. An error ends the demo at once.
  Result<void> run(DemoCluster& cluster);

 private:
  Result<void> await_attached(DemoCluster& cluster);
  Result<void> replay(DemoCluster& cluster);
  Result<void> measure_alone(DemoCluster& cluster);
  Result<void> step(DemoCluster& cluster);
  bool admit_next(DemoCluster& cluster);
  void begin(DemoCluster& cluster, DemoRoom& room);
  void send_request(DemoCluster& cluster, const DemoRoom& room);
  void on_event(DemoCluster& cluster, const ClusterEvent& event);
  void on_ended(Room id);
  void judge_bytes(Room id, const nlohmann::json& landed);
  void on_failed(const DemoRoom& room);
  void abort_survivors(DemoCluster& cluster);
  Result<void> check_progress() const;
  Result<void> await_balance(DemoCluster& cluster);
  bool stopped() const;

  bool kill_is_due() const;
  Result<void> kill_and_recover(DemoCluster& cluster);
  void report_killed(Instant killed_at, std::uint64_t landed);
  void judge_killed(DemoCluster& cluster, Side victim);

  const DemoOptions& options_;
  DemoLayout layout_;
  std::vector<TraceRequest> trace_;
  PoolSizes pools_;
  DemoResults& results_;
  DemoRooms rooms_;
  PrefixCache prefixes_;
  Progress progress_;
  std::size_t next_ = 0;  // row of the trace
  bool attached_[2] = {false, false};
  bool corrupted_ = false;                    // prefill was asked to
  std::optional<nlohmann::json> corruption_;  // where it did
  std::optional<nlohmann::json> stats_[2];
  std::optional<std::string> misfit_;  // why no room can ever land
  std::vector<DemoRoom> killed_;       // ended, and hit by the kill
  bool kill_done_ = false;
  Instant last_event_{};
};

}  // namespace kvferry
