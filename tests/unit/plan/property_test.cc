#include <catch2/catch.hpp>

#include <cstdio>

#include "tests/unit/plan/plan_world.h"

namespace kvferry {
namespace {

using test::Rng;

bool one_case(Rng& rng, test::Tally& tally, std::string& why) {
  const test::World world = test::random_world(rng);
  ++tally.cases;
  bool legal = false;
  std::string reason;
  if (!test::refusals_agree(world, legal, reason)) {
    why = describe(world) + ": " + reason;
    return false;
  }
  if (!legal) {
    ++tally.refused;
    return true;
  }
  const test::Route route{static_cast<RankIndex>(rng.below(world.decode.rank_count())),
                          static_cast<std::uint32_t>(rng.below(world.prefill.dp))};
  const test::Request request = test::random_request(rng, world);
  const bool right = test::transfer_is_right(rng, world, request, route, {}, tally, reason);
  why = describe(world) + " rank " + std::to_string(route.decode_rank) + ": " + reason;
  return right;
}

}  // namespace

// Claim: over random legal topologies, pages, prefixes and chunks, all elected sources together write every
// byte that a destination rank owns of the request exactly once, from the right coordinate, and touch nothing
// else; what is refused is illegal by the oracle's rules. Method: brute force, byte by byte. In long mode
// (KVF_LONG=1) a million cases from seeds of their own.
TEST_CASE("every destination byte is written once, from the right coordinate, and no other byte is touched") {
  const std::uint64_t cases = test::long_mode() ? 1000000 : 60000;
  const std::uint64_t seed = test::test_seed(test::long_mode() ? 20270101 : 20260829);
  std::printf("plan property test: KVF_SEED=%llu\n", static_cast<unsigned long long>(seed));
  test::Tally tally;
  for (std::uint64_t i = 0; i < cases; ++i) {
    Rng rng(seed + i);
    std::string why;
    if (!one_case(rng, tally, why)) {
      FAIL("KVF_SEED=" << seed + i << " (case " << i << " of " << seed << "): " << why);
    }
  }
  std::printf("plan property test: %s\n", tally.to_string().c_str());
  CHECK(tally.transfers >= cases / 3);
  CHECK(tally.refused >= cases / 30);
  CHECK(tally.strided >= cases / 12);
  CHECK(tally.spoiled >= cases / 12);
}

}  // namespace kvferry
