#pragma once
// A child process of the demo: its own process group (so that Ctrl-C reaches the demo alone), killed by the
// kernel when the demo dies, stderr to a log file, stdout (and stdin, where wanted) as pipes. One thread; the
// thread that spawns must live as long as the children.

#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "common/base/result.h"
#include "common/base/unique_fd.h"
#include "tools/engine/protocol.h"

namespace kvferry {

class ChildProcess {
 public:
  struct Options {
    std::string name;  // for messages
    std::string program;
    std::vector<std::string> arguments;
    std::string log;  // appended to
  };
  static Result<ChildProcess> spawn(const Options& options);
  /// Kills and reaps what still runs.
  ~ChildProcess();
  ChildProcess(ChildProcess&& other) noexcept;
  ChildProcess& operator=(ChildProcess&&) = delete;

  /// Non-blocking: the complete lines that have arrived; sets at_end() when the child has closed its stdout.
  Result<std::vector<std::string>> read_lines();
  bool at_end() const { return at_end_; }
  int stdout_fd() const { return stdout_.get(); }
  bool send(const nlohmann::json& command) { return stdin_ && write_line(stdin_.get(), command); }
  void close_stdin() { stdin_.reset(); }

  void signal(int number) const;
  /// Waits for the end until the deadline; true when the child is gone (status() then says how).
  bool wait(std::chrono::milliseconds limit);
  /// "exit status 3", "signal 11"; empty while it runs.
  std::string status();
  bool exited_well() const { return wait_status_ && *wait_status_ == 0; }
  const std::string& name() const { return options_.name; }
  pid_t pid() const { return pid_; }
  /// The last lines of the log, for a report.
  std::string log_tail() const;

 private:
  explicit ChildProcess(Options options) : options_(std::move(options)) {}
  void reap(bool block);

  Options options_;
  pid_t pid_ = -1;
  int pid_fd_ = -1;
  UniqueFd stdin_;
  UniqueFd stdout_;
  LineBuffer lines_;
  bool at_end_ = false;
  std::optional<int> wait_status_;
};

}  // namespace kvferry
