#pragma once
// Digests of KV by what it is, not by where it lies: two ranks of different layouts (TP, DCP, page size, CP)
// that hold the same coordinates get the same sums. A unit is one row of one head (of the latent, of an index
// row; for recurrent state one element of the sharded axis). Its hash is XXH3 of its bytes mixed with its
// coordinate (layer, kind, lane, token), so right bytes in a wrong place are not right; a cell adds up,
// modulo 2^64, all units of one layer and one range of tokens. Sums of disjoint sets add up to the sum of
// their union, so what all sources of a destination meant to send adds up to what must lie in its pool.
//
// Where a coordinate lies is taken from ownership and page lists alone, never from a plan's runs: a wrong
// plan does not check itself.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/plan/plan.h"
#include "common/pool/pool.h"

namespace kvferry {

/// How much of a room is compared: nothing, one cell in n, or (1) every cell.
using VerifyRate = std::uint32_t;
inline constexpr VerifyRate kVerifyOff = 0;
inline constexpr VerifyRate kVerifyFull = 1;

/// Which cells there are: the tokens that decode asked for, in ranges of `range` tokens, aligned to it. State
/// counts as belonging to the last range.
struct DigestGrid {
  Interval tokens;  // from decode's prefix on
  std::uint32_t range = 64;

  std::uint64_t first() const { return tokens.begin / range; }
  std::size_t columns() const {
    return tokens.size() == 0 ? 1 : static_cast<std::size_t>((tokens.end - 1) / range - first() + 1);
  }
  /// Column of a token of `tokens`, and of state.
  std::size_t column(std::uint64_t token) const { return static_cast<std::size_t>(token / range - first()); }
  std::size_t state_column() const { return columns() - 1; }
};
/// At most about 1000 columns, whatever the request's length. Both sides get the same from the grant.
std::uint32_t digest_range(const Interval& request);

/// Whether that cell is compared. `column` counts from token 0.
bool digest_selected(Room room, std::uint32_t layer, std::uint64_t column, VerifyRate rate);

/// Sums by layer and column.
struct Digest {
  std::vector<std::uint32_t> layers;  // ascending; those that have anything, selected or not
  std::size_t columns = 0;
  std::vector<std::uint64_t> sums;  // layer by layer

  friend bool operator==(const Digest&, const Digest&) = default;
};
/// Adds the sums of `part`, whose columns are the same.
void add_digest(Digest& total, const Digest& part);

/// What to read: one rank's rows of one room, all of them (destination) or one chunk of what one destination
/// gets from it (source).
struct DigestTask {
  Room room = 0;
  VerifyRate rate = kVerifyFull;
  DigestGrid grid;
  std::shared_ptr<const ModelGeometry> model;
  std::shared_ptr<const Pool> pool;
  Topology topology;
  RankCoord coord;
  RequestRows rows;    // views into `pages` and `window_pages`
  Interval tokens;     // of the chunk, or of the whole grid
  Interval window;     // tokens of sliding-window layers; empty: none in this task
  bool state = false;  // whether the state is in this task
  /// Source only: the destination.
  struct Peer {
    Topology topology;
    RankCoord coord;
    Interval request;                    // prefill CP shares are of the whole request
    std::vector<std::uint32_t> buffers;  // of `pool`, ascending: those it sends to that destination
  };
  std::optional<Peer> peer;
  std::shared_ptr<const std::vector<std::uint32_t>> pages;
  std::shared_ptr<const std::vector<std::uint32_t>> window_pages;
};

/// Reads the rows and adds them up. Pure but for the reading; call it where its time does not matter.
Digest compute_digest(const DigestTask& task);

/// The first cell in which the sources' sum is not what lies in the pool, as layer and tokens; or a layer of
/// the target model that no source counted. Nothing when all agree. A draft model may be on one side only.
struct DigestMismatch {
  std::uint32_t layer = 0;
  Interval tokens;
  bool missing = false;  // no source counted this layer at all
};
std::optional<DigestMismatch> compare_digests(const Digest& sent, const Digest& lies, const DigestGrid& grid,
                                              std::uint32_t hidden_layers);

}  // namespace kvferry
