#pragma once
// One thread with epoll: file descriptor handlers, tasks posted by other threads, and one deadline.
// Everything except post() and the destructor runs on, or must be called from, the loop's thread. Sleeps in
// the kernel whenever there is nothing to do.

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "common/base/clock.h"
#include "common/base/result.h"
#include "common/base/unique_fd.h"
#include "transport/fabric.h"

namespace kvferry {

inline constexpr Nanos kNever = std::numeric_limits<Nanos>::max();
class EventLoop {
 public:
  using Task = std::function<void()>;
  using Handler = std::function<void(std::uint32_t epoll_events)>;
  using WatchId = std::uint64_t;

  /// kIo when epoll or eventfd cannot be had.
  static Result<std::unique_ptr<EventLoop>> create();
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
  EventLoop() = default;
  void run(const std::function<Nanos(Nanos)>& on_turn);

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
