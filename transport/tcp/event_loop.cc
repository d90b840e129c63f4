#include "transport/tcp/event_loop.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <utility>

#include "common/base/check.h"

namespace kvferry {

Result<std::unique_ptr<EventLoop>> EventLoop::create(Nanos spin_max) {
  std::unique_ptr<EventLoop> loop(new EventLoop(spin_max));
  loop->epoll_.reset(::epoll_create1(EPOLL_CLOEXEC));
  if (!loop->epoll_) {
    return fail(errno_error("epoll_create1", errno));
  }
  loop->wake_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!loop->wake_) {
    return fail(errno_error("eventfd", errno));
  }
  epoll_event event = {};
  event.events = EPOLLIN;
  event.data.u64 = 0;
  if (::epoll_ctl(loop->epoll_.get(), EPOLL_CTL_ADD, loop->wake_.get(), &event) != 0) {
    return fail(errno_error("epoll_ctl for the eventfd", errno));
  }
  return loop;
}

EventLoop::~EventLoop() {
  stop();
}

void EventLoop::start(const char* thread_name, std::function<Nanos(Nanos)> on_turn) {
  KVF_CHECK(!thread_.joinable());
  thread_ = std::thread([this, on_turn = std::move(on_turn)] { run(on_turn); });
  ::pthread_setname_np(thread_.native_handle(), thread_name);
}

void EventLoop::stop() {
  if (!thread_.joinable()) {
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  const std::uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof one);
  thread_.join();
}

void EventLoop::post(Task task) {
  bool first = false;
  {
    const std::lock_guard lock(mutex_);
    first = posted_.empty();
    posted_.push_back(std::move(task));
  }
  if (first) {
    const std::uint64_t one = 1;
    (void)!::write(wake_.get(), &one, sizeof one);
  }
}

void EventLoop::run_posted() {
  std::vector<Task> tasks;
  {
    const std::lock_guard lock(mutex_);
    tasks.swap(posted_);
  }
  for (Task& task : tasks) {
    task();
  }
}

Result<EventLoop::WatchId> EventLoop::watch(int fd, std::uint32_t epoll_events, Handler handler) {
  const WatchId id = next_id_++;
  epoll_event event = {};
  event.events = epoll_events;
  event.data.u64 = id;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    return fail(errno_error("epoll_ctl add", errno));
  }
  watches_.emplace(id, Watch{fd, epoll_events, std::make_shared<Handler>(std::move(handler))});
  return id;
}

void EventLoop::rearm(WatchId id, std::uint32_t epoll_events) {
  const auto found = watches_.find(id);
  if (found == watches_.end() || found->second.events == epoll_events) {
    return;
  }
  found->second.events = epoll_events;
  epoll_event event = {};
  event.events = epoll_events;
  event.data.u64 = id;
  KVF_CHECK(::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, found->second.fd, &event) == 0);
}

void EventLoop::unwatch(WatchId id) {
  const auto found = watches_.find(id);
  if (found != watches_.end()) {
    (void)::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, found->second.fd, nullptr);
    watches_.erase(found);
  }
}

int EventLoop::wait(std::span<epoll_event> events, Nanos wake_at) {
  const auto poll = [&](int timeout_ms) {
    return ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), timeout_ms);
  };
  int count = poll(0);
  if (count > 0) {
    return count;
  }
  const Nanos begin = steady_now();
  Nanos now = begin;
  while (count == 0 && now < begin + spin_.budget() && now < wake_at) {
    count = poll(0);
    now = steady_now();
  }
  if (count == 0) {
    int timeout_ms = -1;
    if (wake_at != kNever) {
      const Nanos left = std::max<Nanos>(0, wake_at - now);
      timeout_ms = static_cast<int>(std::min<Nanos>((left + 999'999) / 1'000'000, 3'600'000));
    }
    count = poll(timeout_ms);
    now = steady_now();
  }
  spin_.waited(now - begin);
  return count;
}

void EventLoop::run(const std::function<Nanos(Nanos)>& on_turn) {
  std::array<epoll_event, 64> events;
  Nanos wake_at = on_turn(steady_now());
  while (true) {
    const int count = wait(events, wake_at);
    if (count > 0) {
      std::uint64_t ignored = 0;
      (void)!::read(wake_.get(), &ignored, sizeof ignored);
    }
    // After the read: it may have taken the wake-up that stop() sent, and nothing would bring another.
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) {
        return;
      }
    }
    run_posted();
    for (int i = 0; i < count; ++i) {
      // An earlier handler of this round may have removed the watch; ids are never reused.
      const auto found = watches_.find(events[static_cast<std::size_t>(i)].data.u64);
      if (found != watches_.end()) {
        const std::shared_ptr<Handler> handler = found->second.handler;
        (*handler)(events[static_cast<std::size_t>(i)].events);
      }
    }
    wake_at = on_turn(steady_now());
  }
}

}  // namespace kvferry
