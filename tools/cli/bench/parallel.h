#pragma once
// Work between the timed windows, on all cores: filling, poisoning and checking pools.

#include <atomic>
#include <cstddef>
#include <thread>
#include <vector>

namespace kvferry {

/// Calls `work(i)` once for each i in [0, count), on `threads` threads (1: on this one), and waits for all.
template <class Work>
void for_each_index(std::size_t count, unsigned threads, const Work& work) {
  std::atomic<std::size_t> next{0};
  const auto run = [&] {
    for (std::size_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) {
      work(i);
    }
  };
  std::vector<std::jthread> helpers;
  for (unsigned i = 1; i < threads; ++i) {
    helpers.emplace_back(run);
  }
  run();
}

}  // namespace kvferry
