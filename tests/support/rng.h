#pragma once
// The random numbers of the tests: splitmix64, the same on every machine. Property tests take their seed from
// test_seed() and print it, so that KVF_SEED=<number> replays a failure.

#include <cstdint>
#include <cstdlib>
#include <numeric>
#include <utility>
#include <vector>

namespace kvferry::test {

class Rng {
 public:
  explicit Rng(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next() {
    state_ += 0x9E3779B97F4A7C15ull;
    std::uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }
  /// Uniform in [0, bound); bound at least 1.
  std::uint64_t below(std::uint64_t bound) { return next() % bound; }
  /// Uniform in [low, high].
  std::uint64_t between(std::uint64_t low, std::uint64_t high) { return low + below(high - low + 1); }
  std::uint32_t between32(std::uint32_t low, std::uint32_t high) {
    return static_cast<std::uint32_t>(between(low, high));
  }
  /// True `in` times of `out_of`.
  bool chance(std::uint64_t in, std::uint64_t out_of) { return below(out_of) < in; }
  template <class T>
  T pick(const std::vector<T>& values) {
    return values[below(values.size())];
  }
  template <class T>
  void shuffle(std::vector<T>& values) {
    for (std::size_t left = values.size(); left > 1; --left) {
      std::swap(values[left - 1], values[below(left)]);
    }
  }

 private:
  std::uint64_t state_;
};

/// 0 to count - 1 in an order of its own for each seed.
inline std::vector<std::uint32_t> shuffled_pages(std::uint32_t count, std::uint64_t seed) {
  std::vector<std::uint32_t> pages(count);
  std::iota(pages.begin(), pages.end(), 0u);
  Rng(seed).shuffle(pages);
  return pages;
}

/// KVF_SEED (decimal or 0x...), else `fallback`.
inline std::uint64_t test_seed(std::uint64_t fallback) {
  const char* text = std::getenv("KVF_SEED");
  return text != nullptr && *text != '\0' ? std::strtoull(text, nullptr, 0) : fallback;
}

}  // namespace kvferry::test
