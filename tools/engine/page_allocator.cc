#include "tools/engine/page_allocator.h"

#include <algorithm>
#include <utility>

namespace kvferry {

PageAllocator::PageAllocator(std::uint32_t total, bool scatter, std::uint64_t seed)
    : scatter_(scatter), random_(seed), free_(total), live_(total, false) {
  for (std::uint32_t i = 0; i < total; ++i) {
    free_[i] = total - 1 - i;
  }
}

std::optional<std::vector<std::uint32_t>> PageAllocator::allocate(std::uint32_t count) {
  if (count > free_.size()) {
    return std::nullopt;
  }
  std::vector<std::uint32_t> pages(count);
  for (std::uint32_t& page : pages) {
    if (scatter_) {
      std::swap(free_[random_() % free_.size()], free_.back());
    }
    page = free_.back();
    free_.pop_back();
    live_[page] = true;
  }
  return pages;
}

Result<void> PageAllocator::release(std::span<const std::uint32_t> pages) {
  for (std::size_t i = 0; i < pages.size(); ++i) {
    const std::uint32_t page = pages[i];
    if (page >= live_.size() || !live_[page]) {
      for (const std::uint32_t undone : pages.first(i)) {
        live_[undone] = true;
      }
      return fail(Code::kInvalid, "page {} was released but is not live (the pool has {} pages)", page,
                  live_.size());
    }
    live_[page] = false;
  }
  // Reversed, so that dense mode hands the same pages out in ascending order again.
  free_.insert(free_.end(), pages.rbegin(), pages.rend());
  return {};
}

}  // namespace kvferry
