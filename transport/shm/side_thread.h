#pragma once
// One thread for calls that may take long (mapping and unmapping pools of many gigabytes), so that the
// fabric's own thread stays quick. Calls run in the order in which they were given.

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace kvferry::shm {

class SideThread {
 public:
  SideThread() : thread_([this] { loop(); }) {}
  /// Ends after the call in progress; calls that have not begun are dropped.
  ~SideThread() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wakeup_.notify_one();
    thread_.join();
  }
  SideThread(const SideThread&) = delete;
  SideThread& operator=(const SideThread&) = delete;

  void run(std::function<void()> call) {
    {
      const std::lock_guard lock(mutex_);
      calls_.push_back(std::move(call));
    }
    wakeup_.notify_one();
  }

 private:
  void loop() {
    std::unique_lock lock(mutex_);
    for (;;) {
      wakeup_.wait(lock, [this] { return stopping_ || !calls_.empty(); });
      if (stopping_) {
        return;
      }
      std::function<void()> call = std::move(calls_.front());
      calls_.pop_front();
      lock.unlock();
      call();
      call = nullptr;  // what it holds goes on this thread, without the lock
      lock.lock();
    }
  }

  std::mutex mutex_;  // guards calls_ and stopping_
  std::condition_variable wakeup_;
  std::deque<std::function<void()>> calls_;
  bool stopping_ = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace kvferry::shm
