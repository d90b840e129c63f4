#pragma once
// The copy threads. Work is queued in lanes, one lane per transfer; the threads take slices from the lanes in
// the order of send_order.h. Within a lane slices start in order.

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "transport/fabric.h"
#include "transport/send_order.h"
#include "transport/shm/copy_work.h"

namespace kvferry::shm {

class CopyCrew {
 public:
  using LaneId = std::uint64_t;
  /// Called on a copy thread, which must only hand it over.
  struct Reports {
    std::function<void(LaneId, std::uint64_t ticket, Nanos first_post, Nanos last_done)> finished;
    std::function<void(LaneId)> idle;  // the answer to a cancel() that returned false
  };

  CopyCrew(std::uint32_t threads, Reports reports);
  /// Ends after the slices in progress; no report is made after this returns.
  ~CopyCrew();
  CopyCrew(const CopyCrew&) = delete;
  CopyCrew& operator=(const CopyCrew&) = delete;

  /// `work` has at least one slice. Lanes come into being with their first work and vanish when empty.
  void add(LaneId lane, std::uint64_t ticket, std::shared_ptr<const CopyWork> work);
  /// Forgets every slice of `lane` that has not begun. True: nothing of it is being copied. False: a slice
  /// is, and idle(lane) follows when it has ended. `lane` must not be used again before that.
  bool cancel(LaneId lane);

 private:
  struct Item {
    std::uint64_t ticket = 0;
    std::shared_ptr<const CopyWork> work;
    std::uint64_t next_slice = 0;
    std::uint64_t slices_left = 0;
    Nanos first_post = 0;
  };
  struct Lane {
    std::deque<std::shared_ptr<Item>> items;  // those with slices that have not begun
    std::uint64_t slices_left = 0;            // of those
    std::uint32_t in_progress = 0;
    bool cancelled = false;
  };
  struct Slice {
    LaneId lane = 0;
    std::shared_ptr<Item> item;
    std::uint64_t index = 0;
  };

  void run();
  Slice begin_slice();
  void end_slice(Slice slice);

  Reports reports_;
  std::mutex mutex_;  // guards all below but threads_
  std::condition_variable wakeup_;
  std::unordered_map<LaneId, Lane> lanes_;
  SendOrder<LaneId> ready_;  // lanes with a slice to begin, by slices left
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace kvferry::shm
