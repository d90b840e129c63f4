#include <catch2/catch.hpp>

#include <cstdio>

#include "tests/unit/plan/hybrid_world.h"

namespace kvferry {
namespace {

using test::Rng;

bool one_case(Rng& rng, test::HybridTally& tally, std::string& why) {
  const test::HybridWorld world = test::random_hybrid(rng);
  ++tally.cases;
  bool legal = false;
  std::string reason;
  if (!test::hybrid_refusals_agree(rng, world, legal, reason)) {
    why = describe(world) + ": " + reason;
    return false;
  }
  if (!legal) {
    ++tally.refused;
    return true;
  }
  const test::Route route{static_cast<RankIndex>(rng.below(world.base.decode.rank_count())),
                          static_cast<std::uint32_t>(rng.below(world.base.prefill.dp))};
  test::Request request = test::random_request(rng, world.base);
  if (rng.chance(1, 12)) {
    request.cuts.push_back(request.tokens);  // the last chunk brings no tokens
  }
  const bool right = test::hybrid_transfer_is_right(rng, world, request, route, tally, reason);
  why = describe(world) + " rank " + std::to_string(route.decode_rank) + ": " + reason;
  return right;
}

}  // namespace

// Claim: over random hybrid models, topologies, pools, pages, prefixes and chunks, the elected sources of all
// parts together write every byte that a destination rank needs of the request (its tokens, the draft model's
// tokens, its window, its state, its index rows) exactly once, from the right coordinate, and touch nothing
// else; what is refused is impossible by the oracle's rules. Method: brute force, byte by byte. In long mode
// (KVF_LONG=1) a million cases from seeds of their own.
TEST_CASE("every byte of every part of a hybrid model is written once, from the right coordinate") {
  const std::uint64_t cases = test::long_mode() ? 1000000 : 60000;
  const std::uint64_t seed = test::test_seed(test::long_mode() ? 20270301 : 20261201);
  std::printf("hybrid property test: KVF_SEED=%llu\n", static_cast<unsigned long long>(seed));
  test::HybridTally tally;
  for (std::uint64_t i = 0; i < cases; ++i) {
    Rng rng(seed + i);
    std::string why;
    if (!one_case(rng, tally, why)) {
      FAIL("KVF_SEED=" << seed + i << " (case " << i << " of " << seed << "): " << why);
    }
  }
  std::printf("hybrid property test: %s\n", tally.to_string().c_str());
  CHECK(tally.transfers >= cases / 3);
  CHECK(tally.refused >= cases / 30);
  for (const std::uint64_t bytes : tally.bytes) {
    CHECK(bytes >= cases * 2);
  }
  CHECK(tally.index_bytes >= cases);
  CHECK(tally.pitched_bytes >= cases);
  CHECK(tally.resharded >= cases / 30);
  CHECK(tally.bare_stages >= cases / 30);
  CHECK(tally.spoiled_plans >= cases / 12);
  CHECK(tally.spoiled_shapes >= cases / 30);
}

}  // namespace kvferry
