// What the kernel tells: its boot id, random bits and the monotonic clock.

#include <catch2/catch.hpp>
#include <cctype>
#include <set>
#include <string>
#include <vector>

#include "common/base/boot_id.h"
#include "common/base/clock.h"
#include "common/base/random.h"

using namespace kvferry;

namespace {

std::size_t bytes_that_ever_differ(std::size_t size) {
  std::vector<std::byte> first(size);
  fill_random(first);
  std::set<std::size_t> differ;
  for (int round = 0; round < 16; ++round) {
    std::vector<std::byte> again(size);
    fill_random(again);
    for (std::size_t i = 0; i < size; ++i) {
      if (first[i] != again[i]) {
        differ.insert(i);
      }
    }
  }
  return differ.size();
}

}  // namespace

TEST_CASE("host facts: the boot id is a UUID and the same on every call") {
  const std::string id = boot_id();
  REQUIRE(id.size() == 36);
  for (std::size_t i = 0; i < id.size(); ++i) {
    CAPTURE(id, i);
    const bool dash = i == 8 || i == 13 || i == 18 || i == 23;
    CHECK((dash ? id[i] == '-' : std::isxdigit(static_cast<unsigned char>(id[i])) != 0));
  }
  CHECK(boot_id() == id);
}

TEST_CASE("host facts: every byte of a random buffer is random, beyond one call of the kernel too") {
  fill_random({});
  // A byte that equals the first fill sixteen times has a chance of 2^-128.
  for (const std::size_t size : {1u, 7u, 16u, 256u, 257u, 5000u}) {
    CAPTURE(size);
    CHECK(bytes_that_ever_differ(size) == size);
  }
}

TEST_CASE("host facts: only the bytes asked for are written") {
  std::vector<std::byte> bytes(64, std::byte{0});
  for (int round = 0; round < 16; ++round) {
    fill_random(std::span(bytes).subspan(8, 16));
  }
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    if (i < 8 || i >= 24) {
      REQUIRE(bytes[i] == std::byte{0});
    }
  }
}

TEST_CASE("host facts: random numbers do not repeat and use all their bits") {
  std::set<std::uint64_t> seen;
  std::uint64_t ones = 0;
  std::uint64_t zeros = 0;
  for (int i = 0; i < 1000; ++i) {
    const std::uint64_t value = random_u64();
    seen.insert(value);
    ones |= value;
    zeros |= ~value;
  }
  CHECK(seen.size() == 1000);
  CHECK(ones == UINT64_MAX);
  CHECK(zeros == UINT64_MAX);
}

TEST_CASE("host facts: the steady clock moves in nanoseconds and never back") {
  const std::int64_t begin = steady_now();
  std::int64_t last = begin;
  int rounds = 0;
  while (last - begin < 1'000'000 && rounds < 100'000'000) {
    const std::int64_t now = steady_now();
    REQUIRE(now >= last);
    last = now;
    ++rounds;
  }
  CHECK(last - begin >= 1'000'000);
  CHECK(rounds > 10);  // a clock of milliseconds would have jumped
}
