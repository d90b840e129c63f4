#pragma once
// How other threads hand commands to a fabric's own thread: a locked list beside an eventfd that wakes its
// epoll. Commands arrive in the order in which they were posted.

#include <sys/eventfd.h>

#include <cerrno>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "common/base/result.h"
#include "common/base/unique_fd.h"

namespace kvferry::shm {

template <class Command>
class Mailbox {
 public:
  Result<void> open() {
    wakeup_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!wakeup_) {
      return fail(errno_error("eventfd for the shm fabric", errno));
    }
    return {};
  }

  /// Readable while there are commands. Borrowed.
  int fd() const { return wakeup_.get(); }

  /// Any thread.
  void post(Command command) {
    const std::lock_guard lock(mutex_);
    commands_.push_back(std::move(command));
    if (commands_.size() == 1) {
      const std::uint64_t one = 1;
      // Cannot fail: the counter is at most 1 because only the first command of a batch adds to it.
      [[maybe_unused]] const auto written = ::write(wakeup_.get(), &one, sizeof one);
    }
  }

  /// The fabric's thread. Everything posted before this call, in order.
  std::vector<Command> take() {
    const std::lock_guard lock(mutex_);
    std::uint64_t count = 0;
    [[maybe_unused]] const auto got = ::read(wakeup_.get(), &count, sizeof count);
    return std::exchange(commands_, {});
  }

 private:
  UniqueFd wakeup_;
  std::mutex mutex_;  // guards commands_ and the eventfd's count
  std::vector<Command> commands_;
};

}  // namespace kvferry::shm
