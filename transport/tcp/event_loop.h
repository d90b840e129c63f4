#pragma once
// One thread with epoll: file descriptor handlers, tasks posted by other threads, and one deadline.
// Everything except post() and the destructor runs on, or must be called from, the loop's thread. Sleeps in
// the kernel when nothing comes for a while.

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <unordered_map>
#include <vector>

#include "common/base/clock.h"
#include "common/base/result.h"
#include "common/base/unique_fd.h"
#include "transport/adaptive_spin.h"
#include "transport/fabric.h"

struct epoll_event;

namespace kvferry {

inline constexpr Nanos kNever = std::numeric_limits<Nanos>::max();
class EventLoop {
 public:
  using Task = std::function<void()>;
  using Handler = std::function<void(std::uint32_t epoll_events)>;
  using WatchId = std::uint64_t;

  /// Polls for up to `spin_max` before it sleeps: see adaptive_spin.h. kIo when epoll or eventfd cannot be
  /// had.
  static Result<std::unique_ptr<EventLoop>> create(Nanos spin_max);
  ~EventLoop();
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  /// Starts the thread. `on_turn` runs after each round of events with the time, and returns when it wants to
  /// run again at the latest (kNever: when something happens).
  void start(const char* thread_name, std::function<Nanos(Nanos now)> on_turn);
  /// Ends the thread; tasks that have not run are dropped. Called by the destructor too.
  void stop();

  /// Any thread. Tasks run in order of posting, before the events of their round.
  void post(Task task);
  /// Runs what was posted up to now: for a handler that sees an effect of something posted meanwhile.
  void run_posted();

  /// Level-triggered. The handler may unwatch anything, itself included.
  Result<WatchId> watch(int fd, std::uint32_t epoll_events, Handler handler);
  void rearm(WatchId id, std::uint32_t epoll_events);
  void unwatch(WatchId id);

 private:
  struct Watch {
    int fd = -1;
    std::uint32_t events = 0;
    std::shared_ptr<Handler> handler;
  };
  explicit EventLoop(Nanos spin_max) : spin_(spin_max) {}
  void run(const std::function<Nanos(Nanos)>& on_turn);
  int wait(std::span<epoll_event> events, Nanos wake_at);

  AdaptiveSpin spin_;
  UniqueFd epoll_;
  UniqueFd wake_;
  std::unordered_map<WatchId, Watch> watches_;
  WatchId next_id_ = 1;  // 0 is the wake descriptor
  std::thread thread_;
  std::mutex mutex_;  // guards posted_ and stopping_
  std::vector<Task> posted_;
  bool stopping_ = false;
};

}  // namespace kvferry
