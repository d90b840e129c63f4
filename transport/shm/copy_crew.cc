#include "transport/shm/copy_crew.h"

#include <pthread.h>

#include "common/base/check.h"
#include "common/base/clock.h"

namespace kvferry::shm {

CopyCrew::CopyCrew(std::uint32_t threads, Reports reports) : reports_(std::move(reports)) {
  for (std::uint32_t i = 0; i < threads; ++i) {
    threads_.emplace_back([this] { run(); });
    pthread_setname_np(threads_.back().native_handle(), "kvf-shm-copy");
  }
}

CopyCrew::~CopyCrew() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wakeup_.notify_all();
  for (std::thread& thread : threads_) {
    thread.join();
  }
}

void CopyCrew::add(LaneId id, std::uint64_t ticket, std::shared_ptr<const CopyWork> work) {
  KVF_CHECK(work->slices() > 0);
  const std::uint64_t slices = work->slices();
  {
    const std::lock_guard lock(mutex_);
    Lane& lane = lanes_[id];
    KVF_CHECK(!lane.cancelled);
    lane.slices_left += slices;
    ready_.set(id, lane.slices_left);
    lane.items.push_back(std::make_shared<Item>(Item{ticket, std::move(work), 0, slices, 0}));
  }
  if (slices == 1) {
    wakeup_.notify_one();
  } else {
    wakeup_.notify_all();
  }
}

bool CopyCrew::cancel(LaneId id) {
  const std::lock_guard lock(mutex_);
  const auto found = lanes_.find(id);
  if (found == lanes_.end()) {
    return true;
  }
  ready_.erase(id);
  found->second.items.clear();
  found->second.slices_left = 0;
  if (found->second.in_progress == 0) {
    lanes_.erase(found);
    return true;
  }
  found->second.cancelled = true;
  return false;
}

void CopyCrew::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wakeup_.wait(lock, [this] { return stopping_ || !ready_.empty(); });
    if (stopping_) {
      return;
    }
    Slice slice = begin_slice();
    lock.unlock();
    slice.item->work->copy(slice.index);
    end_slice(std::move(slice));
    lock.lock();
  }
}

// Called with mutex_ held.
CopyCrew::Slice CopyCrew::begin_slice() {
  const LaneId id = ready_.next();
  Lane& lane = lanes_.at(id);
  Slice slice{id, lane.items.front(), lane.items.front()->next_slice++};
  if (slice.index == 0) {
    slice.item->first_post = steady_now();
  }
  if (slice.item->next_slice == slice.item->work->slices()) {
    lane.items.pop_front();
  }
  if (--lane.slices_left > 0) {
    ready_.set(id, lane.slices_left);
  } else {
    ready_.erase(id);
  }
  ++lane.in_progress;
  return slice;
}

void CopyCrew::end_slice(Slice slice) {
  const std::uint64_t ticket = slice.item->ticket;
  const Nanos first_post = slice.item->first_post;
  bool finished = false;
  bool idle = false;
  {
    const std::lock_guard lock(mutex_);
    Lane& lane = lanes_.at(slice.lane);
    --lane.in_progress;
    finished = --slice.item->slices_left == 0 && !lane.cancelled;
    idle = lane.cancelled && lane.in_progress == 0;
    if (lane.in_progress == 0 && lane.items.empty()) {
      lanes_.erase(slice.lane);
    }
  }
  // This thread lets go of the pools before anybody hears of the end.
  slice.item.reset();
  // Reports are made without the lock: they only post to a mailbox, but that takes a lock of its own.
  if (finished) {
    reports_.finished(slice.lane, ticket, first_post, steady_now());
  }
  if (idle) {
    reports_.idle(slice.lane);
  }
}

}  // namespace kvferry::shm
