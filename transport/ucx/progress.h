#pragma once
// The UCX context of a fabric and the one thread that drives its workers. Everything that touches UCX runs on
// that thread: commands come through submit(), the owner's pump runs after every round of progress. The
// thread sleeps in epoll on the workers' event descriptors and wakes every 100 ms as a guard against a lost
// event.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "common/base/result.h"
#include "common/base/unique_fd.h"
#include "transport/ucx/ucx_options.h"

struct ucp_context;

namespace kvferry::ucx {

class Worker;

/// What an active message brought. Valid during the call only; the bytes come from a peer.
struct Message {
  std::span<const std::byte> header;
  std::span<const std::byte> payload;
};

class Progress {
 public:
  struct Hooks {
    std::function<void(std::uint32_t id, const Message&)> on_message;
    /// Posts what can be posted; called on every round. Must be cheap when there is nothing to do.
    std::function<void()> pump;
    /// Last call on the thread: close every endpoint, then call Progress::run_until.
    std::function<void()> on_stop;
  };

  /// Starts the thread, and on it makes the context and a first worker, which proves that the settings took
  /// effect. No hook runs before begin().
  static Result<std::unique_ptr<Progress>> start(const UcxOptions& options, Hooks hooks);
  ~Progress() { stop(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Lets the thread go; called once by the owner, when its hooks may run.
  void begin();

  /// Runs on_stop, then stops and joins the thread; after this no hook runs and every worker is destroyed.
  void stop();

  /// Any thread. Runs `command` on the worker's thread, in order. False, and it never runs, when stopping.
  bool submit(std::function<void()> command);

  /// Worker's thread only. Progresses until `done` or the time is up; true when done.
  bool run_until(const std::function<bool()>& done, std::int64_t timeout_ns);

  /// Worker's thread only. The worker that a new peer is to use: see worker.h.
  Result<std::shared_ptr<Worker>> worker_for_peer();

  ucp_context* context() const { return context_; }
  const UcxOptions& options() const { return options_; }
  const Hooks& hooks() const { return hooks_; }

  /// Rounds in which the thread came out of epoll; an idle one makes about ten a second.
  std::uint64_t wakeups() const { return wakeups_.load(std::memory_order_relaxed); }

 private:
  friend class Worker;

  Progress(const UcxOptions& options, Hooks hooks) : options_(options), hooks_(std::move(hooks)) {}
  Result<void> open();
  Result<void> open_events();
  Result<void> watch(int fd);
  Result<void> add(Worker& worker);
  void remove(Worker& worker);
  void close();
  void run();
  bool run_commands();
  bool progress_all();
  void wait();

  const UcxOptions options_;
  const Hooks hooks_;
  ucp_context* context_ = nullptr;
  std::vector<Worker*> workers_;          // thread's own
  std::shared_ptr<Worker> first_worker_;  // shared by all peers, or given to the first
  UniqueFd wake_;
  UniqueFd epoll_;
  std::atomic<std::uint64_t> wakeups_{0};

  std::mutex mutex_;  // guards commands_ and stop_
  std::vector<std::function<void()>> commands_;
  bool stop_ = false;
  bool begun_ = false;  // owner's thread only
  std::promise<void> go_;
  std::thread thread_;
};

}  // namespace kvferry::ucx
