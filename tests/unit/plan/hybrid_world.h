#pragma once
// A small hybrid world for the planner: a model of layers that keep all tokens, a window of them, recurrent
// state or nothing, with or without draft layers and index rows; two topologies; and pools whose buffers lie
// in any order, with any gaps between their pages. hybrid_transfer_is_right() plans one request over all its
// parts, as every prefill rank of one DP rank would for one decode rank, and compares the destination memory
// with the oracle's.

#include <array>

#include "tests/unit/plan/plan_world.h"

namespace kvferry::test {

struct HybridWorld {
  World base;
  bool prefill_draft = false;  // whether the side's pools hold the draft model
  bool decode_draft = false;
};

/// Any hybrid model and topologies; about a third are illegal.
HybridWorld random_hybrid(Rng& rng);
std::string describe(const HybridWorld& world);

struct HybridTally {
  std::uint64_t cases = 0;
  std::uint64_t refused = 0;
  std::uint64_t transfers = 0;
  std::uint64_t plans = 0;
  std::array<std::uint64_t, kRowSpaces> bytes{};  // by the space of their part
  std::uint64_t index_bytes = 0;
  std::uint64_t pitched_bytes = 0;  // through a part with gaps between pages, on either side
  std::uint64_t resharded = 0;      // state plans between unequal TP
  std::uint64_t bare_stages = 0;    // pairs of ranks that meet and share no token rows
  std::uint64_t spoiled_plans = 0;
  std::uint64_t spoiled_shapes = 0;

  std::string to_string() const;
};

/// True when pair_layouts() accepts the world iff the oracle calls it legal, and a refusal says why.
bool hybrid_refusals_agree(Rng& rng, const HybridWorld& world, bool& legal, std::string& why);

/// What must hold of one legal world, request and route; false with the reason in `why`:
/// * after all elected sources of all parts, every byte that the destination needs was written once from the
///   right coordinate, and no other byte was touched, gaps included;
/// * who sends anything is one of decode_targets(), and prefill_destinations() names the destination for it;
/// * ranks that are no targets share nothing;
/// * each run's dst_index names the row dst_row in the page list of its part, and runs ascend by it;
/// * parts and shapes that are broken on purpose are refused iff the oracle calls them illegal.
bool hybrid_transfer_is_right(Rng& rng, const HybridWorld& world, const Request& request, const Route& route,
                              HybridTally& tally, std::string& why);

}  // namespace kvferry::test
