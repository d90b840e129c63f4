#pragma once
// Hands out the pages (or aux slots) of one rank and keeps the balance free + live = total. In scattered mode
// a request's pages lie in random order all over the pool, as they do in an engine that has run for hours; in
// dense mode they are consecutive while the pool is fresh. One thread.

#include <cstdint>
#include <optional>
#include <random>
#include <span>
#include <vector>

#include "common/base/result.h"

namespace kvferry {

class PageAllocator {
 public:
  PageAllocator(std::uint32_t total, bool scatter, std::uint64_t seed);

  /// All `count` pages, or none when fewer are free.
  std::optional<std::vector<std::uint32_t>> allocate(std::uint32_t count);
  /// Refuses, changing nothing, when a page is unknown, repeated or not live.
  Result<void> release(std::span<const std::uint32_t> pages);

  std::uint32_t total() const { return static_cast<std::uint32_t>(live_.size()); }
  std::uint32_t free_count() const { return static_cast<std::uint32_t>(free_.size()); }
  std::uint32_t live_count() const { return total() - free_count(); }

 private:
  bool scatter_;
  std::mt19937_64 random_;
  std::vector<std::uint32_t> free_;  // taken from the back
  std::vector<bool> live_;
};

}  // namespace kvferry
