#include <catch2/catch.hpp>

#include "transport/adaptive_spin.h"

namespace kvferry::test {
namespace {

TEST_CASE("adaptive spin: polls while waits are short, stops within a few long ones, starts again at once") {
  AdaptiveSpin spin(1600);
  CHECK(spin.budget() == 0);
  spin.waited(1601);
  CHECK(spin.budget() == 0);
  spin.waited(1600);
  CHECK(spin.budget() == 1600);
  Nanos polled = 0;
  int waits = 0;
  while (spin.budget() > 0) {
    polled += spin.budget();
    spin.waited(1'000'000);
    ++waits;
  }
  CHECK(waits == 5);  // 1600, 800, 400, 200, 100
  CHECK(polled == 3100);
  spin.waited(10);
  CHECK(spin.budget() == 1600);
}

TEST_CASE("adaptive spin: with a limit of 0 a thread never polls") {
  AdaptiveSpin spin(0);
  for (const Nanos took : {0, 1, 1000}) {
    spin.waited(took);
    CHECK(spin.budget() == 0);
  }
}

}  // namespace
}  // namespace kvferry::test
