#pragma once
// The four processes of the demo: a daemon and a synthetic engine on either side, their configuration files
// and logs in one private directory. Reports what they say as events. One thread.

#include <array>
#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "tools/cli/demo/child_process.h"
#include "tools/cli/demo/demo_options.h"

namespace kvferry {

struct ClusterEvent {
  Side side = Side::kPrefill;
  nlohmann::json body;  // an event of tools/engine/protocol.h
};

class DemoCluster {
 public:
  /// `program_directory` holds kvferry itself. The directory is removed at the end unless options.keep.
  static Result<std::unique_ptr<DemoCluster>> create(const DemoOptions& options, const DemoLayout& layout,
                                                     const PoolSizes& pools,
                                                     const std::filesystem::path& program_directory);
  ~DemoCluster();
  DemoCluster(const DemoCluster&) = delete;
  DemoCluster& operator=(const DemoCluster&) = delete;

  /// Starts both daemons, waits until they are ready, then starts the engines.
  Result<void> start();
  /// The daemons alone, for a caller that is both engines itself.
  Result<void> start_daemons();
  /// An error is an interrupt, or a daemon that ended although nobody asked it to.
  Result<void> check_daemons();
  /// False when the engine's end of the pipe is gone (poll() then reports its death).
  bool send(Side side, const nlohmann::json& command);
  /// What the engines have said, waiting up to `limit` for the first word. An error is an interrupt, or a
  /// process that ended although nobody asked it to.
  Result<std::vector<ClusterEvent>> poll(std::chrono::milliseconds limit);

  void kill_daemon(Side side);
  /// Starts the daemon again, prefill on the port that it had before.
  Result<void> restart_daemon(Side side);
  /// Engines first, then daemons (SIGTERM). Errors name who did not end by itself or not well.
  Result<void> stop();

  const std::string& bootstrap() const { return bootstrap_; }
  const std::string& metrics(Side side) const { return metrics_[index(side)]; }
  std::string engine_socket(Side side) const {
    return (directory_ / (std::string(side_name(side)) + ".sock")).string();
  }
  /// Of a daemon that was started.
  pid_t daemon_pid(Side side) const { return daemons_[index(side)]->pid(); }
  const std::filesystem::path& directory() const { return directory_; }
  /// Texts that name a side's daemon in a reason: its instance and its addresses.
  std::vector<std::string> daemon_names(Side side) const;
  /// Waits for the interrupt; for --hold.
  void wait_for_interrupt();

 private:
  DemoCluster(const DemoOptions& options, const DemoLayout& layout, const PoolSizes& pools,
              std::filesystem::path program_directory);
  static std::size_t index(Side side) { return static_cast<std::size_t>(side); }
  Result<void> write_config(Side side) const;
  std::string model() const;  // as the daemons and engines are told
  Result<void> start_daemon(Side side);
  Result<void> await_ready(Side side);
  Result<void> start_engine(Side side);
  Result<void> check_interrupt();
  Result<void> read_engine(Side side, std::vector<ClusterEvent>& events);
  Result<void> check_alive(ChildProcess& child) const;
  std::string log_path(const std::string& name) const { return (directory_ / (name + ".log")).string(); }

  DemoOptions options_;
  DemoLayout layout_;
  PoolSizes pools_;
  std::filesystem::path program_directory_;
  std::filesystem::path directory_;
  UniqueFd signals_;
  std::string bootstrap_;  // of the prefill daemon, "host:port"
  std::array<std::string, 2> metrics_;
  std::array<std::unique_ptr<ChildProcess>, 2> daemons_;
  std::array<std::unique_ptr<ChildProcess>, 2> engines_;
};

}  // namespace kvferry
