#pragma once
// Whose turn it is among the transfers that have something to send: the one with the least left goes first,
// so that a short prompt does not wait behind a long one, and every eighth turn belongs to the one that has
// waited longest, so that a long one never stands still. Deterministic, single-threaded; O(log n) per call.

#include <cstdint>
#include <set>
#include <tuple>
#include <unordered_map>

#include "common/base/check.h"

namespace kvferry {

/// `Lane` names a transfer; hashable and comparable.
template <class Lane>
class SendOrder {
 public:
  /// `left` is what the lane has to send, in any unit that all lanes share. A lane that is here already keeps
  /// its age.
  void set(const Lane& lane, std::uint64_t left) {
    const auto [found, fresh] = lanes_.try_emplace(lane, Place{left, next_arrival_});
    Place& place = found->second;
    if (fresh) {
      by_left_.emplace(left, next_arrival_, lane);
      by_age_.emplace(next_arrival_++, lane);
    } else if (place.left != left) {
      // The node moves within the set: nothing is allocated while a transfer is being sent.
      auto node = by_left_.extract(Key{place.left, place.arrival, lane});
      place.left = left;
      std::get<0>(node.value()) = left;
      by_left_.insert(std::move(node));
    }
  }
  void erase(const Lane& lane) {
    const auto found = lanes_.find(lane);
    if (found == lanes_.end()) {
      return;
    }
    by_left_.erase(Key{found->second.left, found->second.arrival, lane});
    by_age_.erase({found->second.arrival, lane});
    lanes_.erase(found);
  }
  bool contains(const Lane& lane) const { return lanes_.contains(lane); }
  bool empty() const { return lanes_.empty(); }
  std::size_t size() const { return lanes_.size(); }
  /// Not while empty().
  Lane next() {
    KVF_CHECK(!empty());
    Lane first{};
    offer_turn([&](const Lane& lane) {
      first = lane;
      return true;
    });
    return first;
  }

  /// Offers lanes until one takes its turn: `take(lane)` is false when that lane has nothing to send just
  /// now. False when none took it. `take` must not change the order.
  template <class Take>
  bool offer_turn(Take take) {
    if (++turns_ % kOldestEvery == 0 && !empty() && take(by_age_.begin()->second)) {
      return true;
    }
    for (const Key& key : by_left_) {
      if (take(std::get<2>(key))) {
        return true;
      }
    }
    return false;
  }

  static constexpr std::uint64_t kOldestEvery = 8;

 private:
  struct Place {
    std::uint64_t left = 0;
    std::uint64_t arrival = 0;
  };
  using Key = std::tuple<std::uint64_t, std::uint64_t, Lane>;  // left, arrival, lane

  std::unordered_map<Lane, Place> lanes_;
  std::set<Key> by_left_;
  std::set<std::pair<std::uint64_t, Lane>> by_age_;  // arrival, lane
  std::uint64_t next_arrival_ = 0;
  std::uint64_t turns_ = 0;
};

}  // namespace kvferry
