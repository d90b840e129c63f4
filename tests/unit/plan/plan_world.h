#pragma once
// A small world for the planner: a model, two topologies with their page sizes, and one request between them.
// transfer_is_right() plans the request as all prefill ranks of one DP rank would for one decode rank,
// carries the plans out byte by byte, and compares the destination memory with the oracle's. Everything that
// a World or a Request leaves open (which physical pages, how chunks name them) is drawn from the Rng, so a
// case is repeated by its seed.

#include <cstdint>
#include <string>
#include <vector>

#include "common/plan/plan.h"
#include "tests/support/rng.h"

namespace kvferry::test {

/// KVF_LONG=1: run what takes minutes as well.
bool long_mode();

struct World {
  ModelGeometry model;
  Topology prefill;
  Topology decode;
  std::uint32_t prefill_page = 1;
  std::uint32_t decode_page = 1;

  /// Tokens that one page number of the side stands for.
  std::uint64_t prefill_virtual_page() const { return std::uint64_t{prefill_page} * prefill.dcp; }
  std::uint64_t decode_virtual_page() const { return std::uint64_t{decode_page} * decode.dcp; }
};

/// Any model and any topologies of up to 16 ranks per axis; about two in five are illegal.
World random_world(Rng& rng);
Topology random_topology(Rng& rng, const ModelGeometry& model);
/// `count` different pages of a pool: scattered, or consecutive with one wrap.
std::vector<std::uint32_t> random_pages(Rng& rng, std::uint64_t count, std::uint64_t pool_pages);
std::string describe(const World& world);

/// True when validate_pair() and pair_layout() accept the world iff the oracle calls it legal, and a refusal
/// says why. `legal` is the oracle's judgement.
bool refusals_agree(const World& world, bool& legal, std::string& why);

/// One request, cut into chunks.
struct Request {
  std::uint64_t prefix = 0;  // tokens the decode side already has
  std::uint64_t tokens = 0;
  std::uint64_t dst_first = 0;  // the token at which the destination's page list begins
  Room room = 1;
  std::vector<std::uint64_t> cuts;  // chunk ends, ascending, the last is `tokens`
};
Request random_request(Rng& rng, const World& world);

struct Route {
  RankIndex decode_rank = 0;
  std::uint32_t prefill_dp = 0;
};

/// How much a transfer is checked beyond its bytes.
struct Effort {
  bool all_ranks = false;  // look at every prefill rank that is no target, not at one in eight
  bool spoil = true;       // break a sixth of the chunks and compare the planner's verdict with the oracle's
};

struct Tally {
  std::uint64_t cases = 0;
  std::uint64_t refused = 0;
  std::uint64_t transfers = 0;
  std::uint64_t chunks = 0;
  std::uint64_t runs = 0;
  std::uint64_t strided = 0;
  std::uint64_t spoiled = 0;

  /// "3 cases, 1 refused, ..."
  std::string to_string() const;
};

/// What must hold of one legal world, request and route; false with the reason in `why`:
/// * decode_targets() names nobody twice, one sender of the aux row, and as many answers as senders;
///   prefill_destinations() is its inverse, and pair_layout() elects the same sources;
/// * ranks that are no targets share nothing with the destination;
/// * after all sources, every byte of the destination's tokens was written once from the right coordinate,
///   and no other byte was touched;
/// * each run's dst_index names the row dst_row in the page list; runs ascend by it, but where both sides
///   interleave in blocks of different size; runs that continue each other are one;
/// * chunks that are broken on purpose are refused iff the oracle calls them illegal.
bool transfer_is_right(Rng& rng, const World& world, const Request& request, const Route& route,
                       const Effort& effort, Tally& tally, std::string& why);

}  // namespace kvferry::test
