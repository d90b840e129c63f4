#include <catch2/catch.hpp>
#include <vector>

#include "transport/shm/calibrate.h"

namespace kvferry::test {
namespace {

std::uint32_t chosen(std::uint32_t threads_max, double (*rate)(std::uint32_t),
                     std::vector<std::uint32_t>& asked) {
  return shm::choose_copy_threads(threads_max, [&](std::uint32_t threads) {
    asked.push_back(threads);
    return rate(threads);
  });
}

TEST_CASE(
    "shm calibration: takes threads for as long as they pay, and measures nothing where there is no choice") {
  std::vector<std::uint32_t> asked;
  CHECK(chosen(
            8, [](std::uint32_t n) { return 10.0 * n; }, asked) == 8);
  CHECK(asked == std::vector<std::uint32_t>{1, 2, 4, 8});
  asked.clear();
  CHECK(chosen(
            8, [](std::uint32_t n) { return n < 2 ? 10.0 : 19.0; }, asked) == 2);
  CHECK(asked == std::vector<std::uint32_t>{1, 2, 4});
  asked.clear();
  CHECK(chosen(
            3, [](std::uint32_t n) { return 10.0 * n; }, asked) == 2);
  CHECK(chosen(
            8, [](std::uint32_t) { return 0.0; }, asked) == 1);
  asked.clear();
  CHECK(chosen(
            1, [](std::uint32_t) { return 1.0; }, asked) == 1);
  CHECK(chosen(
            0, [](std::uint32_t) { return 1.0; }, asked) == 1);
  CHECK(asked.empty());
}

TEST_CASE("shm calibration: measures something plausible, and no memory is no crash") {
  for (const std::uint32_t threads : {1u, 3u}) {
    const double rate = shm::measure_copy_rate(threads, 8 << 20);
    CHECK(rate > 1e7);
    CHECK(rate < 1e13);
  }
  CHECK(shm::measure_copy_rate(1, 1ull << 60) == 0);
}

}  // namespace
}  // namespace kvferry::test
