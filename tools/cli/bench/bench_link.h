#pragma once
// One pair of daemons on one fabric, and the connections of all ranks of both engines to it. One thread.

#include <array>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "common/engine/kvferry.h"
#include "tools/cli/bench/bench_side.h"
#include "tools/cli/demo/demo_cluster.h"

namespace kvferry {

class BenchLink {
 public:
  /// Starts the daemons; options.fabric names theirs.
  static Result<std::unique_ptr<BenchLink>> start(const DemoOptions& options, const DemoLayout& layout,
                                                  const PoolSizes& pools,
                                                  const std::filesystem::path& program_directory);
  ~BenchLink();
  BenchLink(const BenchLink&) = delete;
  BenchLink& operator=(const BenchLink&) = delete;

  /// Hands the pools of a side to its daemon. Both sides are attached before the first room.
  Result<void> attach(const BenchSide& side);
  /// Detaches the engines and ends the daemons.
  Result<void> stop();

  const std::string& fabric() const { return fabric_; }
  /// Of the side's ranks, in their order.
  const std::vector<kvf_engine*>& engines(Side side) const {
    return engines_[static_cast<std::size_t>(side)];
  }
  DemoCluster& cluster() { return *cluster_; }
  const DemoCluster& cluster() const { return *cluster_; }

 private:
  explicit BenchLink(std::string fabric) : fabric_(std::move(fabric)) {}
  void detach();

  std::string fabric_;
  std::string dtype_;
  std::unique_ptr<DemoCluster> cluster_;
  std::array<std::vector<kvf_engine*>, 2> engines_;
};

}  // namespace kvferry
