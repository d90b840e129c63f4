#pragma once
// One thread that reads digests, in the order in which they were asked for, so that the daemon's own thread
// never waits for memory.

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "common/verify/digest.h"

namespace kvferry {

class DigestCrew {
 public:
  DigestCrew();
  /// What has not begun is dropped; nothing is called any more after this.
  ~DigestCrew();
  DigestCrew(const DigestCrew&) = delete;
  DigestCrew& operator=(const DigestCrew&) = delete;

  /// `done` is called on the crew's thread and must only hand the digest over.
  void read(std::shared_ptr<const DigestTask> task, std::function<void(Digest&&)> done);

 private:
  struct Item {
    std::shared_ptr<const DigestTask> task;
    std::function<void(Digest&&)> done;
  };
  void work();

  std::mutex mutex_;  // guards items_ and stop_
  std::condition_variable changed_;
  std::deque<Item> items_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace kvferry
