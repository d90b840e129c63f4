#include "transport/send_order.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <map>

#include "tests/support/rng.h"

namespace kvferry::test {
namespace {

TEST_CASE("send order: short ones go first, the oldest one never stands still") {
  SendOrder<int> order;
  order.set(0, 1000);  // long, and first
  std::uint64_t long_left = 1000;
  std::uint64_t turns = 0;
  // Short ones keep coming: there are always two of them.
  int next_lane = 1;
  std::map<int, std::uint64_t> left;
  std::map<int, std::uint64_t> begun;
  std::uint64_t longest_stay = 0;
  while (long_left > 0) {
    while (left.size() < 2) {
      left[next_lane] = 4;
      begun[next_lane] = turns;
      order.set(next_lane++, 4);
    }
    const int lane = order.next();
    ++turns;
    std::uint64_t& rest = lane == 0 ? long_left : left.at(lane);
    if (--rest > 0) {
      order.set(lane, rest);
    } else {
      order.erase(lane);
      if (lane != 0) {
        longest_stay = std::max(longest_stay, turns - begun.at(lane));
        left.erase(lane);
      }
    }
  }
  CHECK(turns <= 1000 * SendOrder<int>::kOldestEvery);
  CHECK(turns >= 990 * SendOrder<int>::kOldestEvery);  // at its end it is a short one itself
  CHECK(longest_stay <= 10);  // two of them, four turns each, and the long one's share
}

TEST_CASE("send order: agrees with a plain list under random changes") {
  const auto seed = test_seed(0x50D3);
  INFO("seed " << seed);
  Rng random(seed);
  struct Entry {
    std::uint64_t left;
    std::uint64_t arrival;
  };
  SendOrder<int> order;
  std::map<int, Entry> plain;
  std::uint64_t arrivals = 0;
  std::uint64_t turns = 0;
  for (int step = 0; step < 20000; ++step) {
    const int lane = static_cast<int>(random.below(20));
    switch (random.below(4)) {
      case 0: {
        const std::uint64_t left = random.below(5);
        order.set(lane, left);
        const auto found = plain.find(lane);
        if (found == plain.end()) {
          plain[lane] = Entry{left, arrivals++};
        } else {
          found->second.left = left;
        }
        break;
      }
      case 1:
        order.erase(lane);
        plain.erase(lane);
        break;
      default:
        if (plain.empty()) {
          CHECK(order.empty());
          break;
        }
        const bool oldest = ++turns % SendOrder<int>::kOldestEvery == 0;
        const auto first = std::min_element(plain.begin(), plain.end(), [&](const auto& a, const auto& b) {
          return oldest ? a.second.arrival < b.second.arrival
                        : std::pair(a.second.left, a.second.arrival) <
                              std::pair(b.second.left, b.second.arrival);
        });
        REQUIRE(order.next() == first->first);
        break;
    }
    REQUIRE(order.size() == plain.size());
    REQUIRE(order.contains(lane) == plain.contains(lane));
  }
}

}  // namespace
}  // namespace kvferry::test
