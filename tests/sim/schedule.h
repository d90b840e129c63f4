#pragma once
// Virtual time: what happens when, in one thread. Two events of the same moment happen in the order in which
// they were planned, so a run depends on nothing but its seed.

#include <cstdint>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

#include "transport/fabric.h"

namespace kvferry::sim {

inline constexpr Nanos kMicro = 1'000;
inline constexpr Nanos kMilli = 1'000'000;
inline constexpr Nanos kSecond = 1'000'000'000;

class Schedule {
 public:
  Nanos now() const { return now_; }
  std::uint64_t events() const { return events_; }

  void at(Nanos when, std::function<void()> what) {
    queue_.push(Item{when < now_ ? now_ : when, next_++, std::move(what)});
  }
  void after(Nanos delay, std::function<void()> what) { at(now_ + delay, std::move(what)); }

  /// Does the next thing; false when nothing is planned before `end`.
  bool step(Nanos end) {
    if (queue_.empty() || queue_.top().when > end) {
      now_ = end > now_ ? end : now_;
      return false;
    }
    Item item = std::move(const_cast<Item&>(queue_.top()));  // moved out and popped at once
    queue_.pop();
    now_ = item.when;
    ++events_;
    item.what();
    return true;
  }

 private:
  struct Item {
    Nanos when;
    std::uint64_t order;
    std::function<void()> what;
    friend bool operator<(const Item& a, const Item& b) {
      return a.when != b.when ? a.when > b.when : a.order > b.order;  // the earliest on top
    }
  };

  std::priority_queue<Item> queue_;
  Nanos now_ = kSecond;
  std::uint64_t next_ = 0;
  std::uint64_t events_ = 0;
};

/// What happened, as one number: two runs that did the same things in the same order have the same.
class Trace {
 public:
  void add(std::uint64_t kind, std::uint64_t a = 0, std::uint64_t b = 0, std::uint64_t c = 0) {
    for (const std::uint64_t value : {kind, a, b, c}) {
      hash_ = (hash_ ^ value) * 0x9E3779B97F4A7C15ull;
      hash_ ^= hash_ >> 29;
    }
  }
  std::uint64_t hash() const { return hash_; }

 private:
  std::uint64_t hash_ = 0x6B76666572727931ull;
};

}  // namespace kvferry::sim
