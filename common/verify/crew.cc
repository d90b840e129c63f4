#include "common/verify/crew.h"

#include <utility>

namespace kvferry {

DigestCrew::DigestCrew() : thread_([this] { work(); }) {}

DigestCrew::~DigestCrew() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void DigestCrew::read(std::shared_ptr<const DigestTask> task, std::function<void(Digest&&)> done) {
  {
    const std::lock_guard lock(mutex_);
    items_.push_back({std::move(task), std::move(done)});
  }
  changed_.notify_one();
}

void DigestCrew::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stop_ || !items_.empty(); });
    if (stop_) {
      return;
    }
    const Item item = std::move(items_.front());
    items_.pop_front();
    lock.unlock();
    item.done(compute_digest(*item.task));
    lock.lock();
  }
}

}  // namespace kvferry
