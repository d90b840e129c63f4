#pragma once
// One UCX context and worker, and the one thread that owns both. Everything that touches UCX runs on that
// thread: commands come through submit(), the owner's pump runs after every round of progress. The thread
// sleeps in epoll on UCX's event descriptor and wakes every 100 ms as a guard against a lost event.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "common/base/result.h"
#include "common/base/unique_fd.h"
#include "transport/ucx/ucx_options.h"

struct ucp_context;
struct ucp_worker;

namespace kvferry::ucx {

/// What an active message brought. Valid during the call only; the bytes come from a peer.
struct Message {
  std::span<const std::byte> header;
  std::span<const std::byte> payload;
};

class Worker {
 public:
  struct Hooks {
    std::function<void(std::uint32_t id, const Message&)> on_message;
    /// Posts what can be posted; called on every round. Must be cheap when there is nothing to do.
    std::function<void()> pump;
    /// Last call on the thread: close every endpoint, then call Worker::run_until.
    std::function<void()> on_stop;
  };

  /// Starts the thread, creates context and worker on it and checks that the settings took effect. Message
  /// ids 1..kMessageIds are handed to on_message. No hook runs before begin().
  static Result<std::unique_ptr<Worker>> start(const UcxOptions& options, Hooks hooks);
  ~Worker() { stop(); }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  static constexpr std::uint32_t kMessageIds = 16;

  /// Lets the thread go; called once by the owner, when its hooks may run.
  void begin();

  /// Runs on_stop, then stops and joins the thread; after this no hook runs.
  void stop();

  /// Any thread. Runs `command` on the worker's thread, in order; dropped when the worker is stopping.
  void submit(std::function<void()> command);

  /// Worker's thread only. Progresses until `done` or the time is up; true when done.
  bool run_until(const std::function<bool()>& done, std::int64_t timeout_ns);

  ucp_worker* handle() const { return worker_; }
  ucp_context* context() const { return context_; }
  const std::vector<std::byte>& address() const { return address_; }

  /// Rounds in which the thread came out of epoll; an idle worker makes about ten a second.
  std::uint64_t wakeups() const { return wakeups_.load(std::memory_order_relaxed); }

 private:
  struct HandlerSlot {
    Worker* worker = nullptr;
    std::uint32_t id = 0;
  };

  Worker(const UcxOptions& options, Hooks hooks) : options_(options), hooks_(std::move(hooks)) {}
  Result<void> open();
  Result<void> open_worker();
  Result<void> set_handlers();
  Result<void> open_events();
  void close();
  void run();
  bool run_commands();
  void wait();
  friend struct WorkerCallbacks;

  const UcxOptions options_;
  const Hooks hooks_;
  ucp_context* context_ = nullptr;
  ucp_worker* worker_ = nullptr;
  std::vector<std::byte> address_;
  std::vector<HandlerSlot> slots_;
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

/// UCX's words for a status number.
Error ucs_error(int status, std::string_view what);

/// Monotonic clock in nanoseconds.
std::int64_t now_ns();

}  // namespace kvferry::ucx
