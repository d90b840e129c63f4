#include "tools/engine/page_allocator.h"

#include <algorithm>
#include <random>
#include <set>

#include <catch2/catch.hpp>

namespace kvferry {

TEST_CASE("a page has one owner at a time and the balance always holds") {
  const std::uint64_t seed = std::random_device{}();
  INFO("seed " << seed);
  std::mt19937_64 random(seed);
  for (const bool scatter : {false, true}) {
    PageAllocator allocator(257, scatter, seed);
    std::vector<std::vector<std::uint32_t>> live;
    std::set<std::uint32_t> owned;
    for (int step = 0; step < 4000; ++step) {
      if (random() % 2 == 0) {
        const auto count = static_cast<std::uint32_t>(random() % 64);
        const std::uint32_t free = allocator.free_count();
        auto pages = allocator.allocate(count);
        REQUIRE(pages.has_value() == (count <= free));
        if (pages) {
          REQUIRE(pages->size() == count);
          for (const std::uint32_t page : *pages) {
            REQUIRE(page < 257);
            REQUIRE(owned.insert(page).second);
          }
          live.push_back(std::move(*pages));
        }
      } else if (!live.empty()) {
        const std::size_t index = random() % live.size();
        REQUIRE(allocator.release(live[index]).has_value());
        for (const std::uint32_t page : live[index]) {
          owned.erase(page);
        }
        live.erase(live.begin() + static_cast<std::ptrdiff_t>(index));
      }
      REQUIRE(allocator.live_count() == owned.size());
      REQUIRE(allocator.free_count() + allocator.live_count() == allocator.total());
    }
  }
}

TEST_CASE("releasing a page twice, or one that is unknown, is refused and changes nothing") {
  PageAllocator allocator(8, false, 1);
  const auto pages = allocator.allocate(4);
  REQUIRE(pages);
  const std::vector<std::uint32_t> repeated{(*pages)[0], (*pages)[1], (*pages)[0]};
  CHECK_FALSE(allocator.release(repeated).has_value());
  CHECK_FALSE(allocator.release(std::vector<std::uint32_t>{(*pages)[0], 8}).has_value());
  CHECK_FALSE(allocator.release(std::vector<std::uint32_t>{7}).has_value());
  CHECK(allocator.live_count() == 4);
  CHECK(allocator.release(*pages).has_value());
  CHECK_FALSE(allocator.release(*pages).has_value());
  CHECK(allocator.free_count() == 8);
}

TEST_CASE("dense pages are consecutive and scattered pages are not, repeatably by seed") {
  PageAllocator dense(64, false, 1);
  const auto run = dense.allocate(16);
  REQUIRE(run);
  CHECK(std::is_sorted(run->begin(), run->end()));
  CHECK(run->back() - run->front() == 15);

  PageAllocator first(1024, true, 7);
  PageAllocator second(1024, true, 7);
  PageAllocator third(1024, true, 8);
  const auto pages = first.allocate(64);
  CHECK(pages == second.allocate(64));
  CHECK(pages != third.allocate(64));
  CHECK_FALSE(std::is_sorted(pages->begin(), pages->end()));
}

}  // namespace kvferry
