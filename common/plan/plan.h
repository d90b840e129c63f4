#pragma once
// A plan: which bytes of one prefill rank's pool go where in one decode rank's pool for one chunk. It is the
// product of `runs` (which rows, shared by all layers) and `pairs` (which buffers, which bytes of each row),
// so its size is O(runs) + O(buffers) and never runs times layers. Row r of a buffer lies at base + r *
// row_bytes, because a pool buffer is an array of pages and a page an array of rows: row = page * page_size +
// slot.

#include <cstdint>
#include <span>
#include <vector>

#include "common/base/ids.h"
#include "common/base/result.h"
#include "common/model/geometry.h"
#include "common/topology/rank_map.h"
#include "common/topology/topology.h"

namespace kvferry {

/// `count` >= 1 pieces of `rows` >= 1 consecutive rows each. Piece k starts at row src_row + k*src_step and
/// goes to dst_row + k*dst_step. `dst_index` is the destination in the room's own granted row space (index
/// into the grant's page list * page_size + slot); it advances by dst_step like dst_row, and is what goes on
/// the wire where the receiver translates. A single piece has both steps equal to `rows`, so a side is
/// contiguous over the whole run iff its step equals `rows`. Pieces never overlap. Runs are ordered by token
/// and dst_index ascends over them, except where both sides interleave in blocks of different size.
struct RowRun {
  std::uint64_t src_row = 0;
  std::uint64_t dst_row = 0;
  std::uint64_t dst_index = 0;
  std::uint32_t rows = 0;
  std::uint32_t count = 0;
  std::uint32_t src_step = 0;
  std::uint32_t dst_step = 0;
  friend bool operator==(const RowRun&, const RowRun&) = default;
};

/// One source buffer and the destination buffer of the same (layer, kind), and the slice of each row that
/// moves.
struct BufferPair {
  std::uint32_t src_buffer = 0;  // index into the source pool's buffers
  std::uint32_t dst_buffer = 0;
  std::uint32_t src_row_bytes = 0;
  std::uint32_t dst_row_bytes = 0;
  std::uint32_t src_offset = 0;  // bytes into the source row
  std::uint32_t dst_offset = 0;
  std::uint32_t bytes = 0;  // per row
  friend bool operator==(const BufferPair&, const BufferPair&) = default;
};

struct Plan {
  std::vector<RowRun> runs;
  std::vector<BufferPair> pairs;
  std::uint64_t rows = 0;   // per pair
  std::uint64_t bytes = 0;  // rows * sum of pair bytes
};

/// One buffer of a rank's pool as the planner sees it.
struct BufferShape {
  std::uint32_t layer = 0;  // global layer id
  BufferKind kind = BufferKind::kLatent;
  std::uint32_t row_bytes = 0;
  std::uint64_t pages = 0;
  friend bool operator==(const BufferShape&, const BufferShape&) = default;
};

/// One rank's side of a plan.
struct RankShape {
  Topology topology;
  RankCoord coord;
  std::uint32_t page_size = 0;
  std::vector<BufferShape> buffers;
};

/// Buffers of `coord` in pool order (K of all layers, then V of all layers; MLA one per layer). Layers are
/// the stage's cached_layers(): sliding layers included, draft layers not. The topology must be valid.
std::vector<BufferShape> rank_buffers(const ModelGeometry& model, const Topology& topology,
                                      const RankCoord& coord, std::uint64_t pages);

/// Everything about one (prefill rank, decode rank) pair that does not change with the room.
struct PairLayout {
  std::vector<BufferPair> pairs;  // empty when src is no target of dst, or they share no (layer, head)
  TokenClass src_tokens;
  TokenClass dst_tokens;
  CpPlace src_cp;
  std::uint32_t src_page_size = 0;
  std::uint32_t dst_page_size = 0;
  std::uint32_t replica = 0;  // this source is elected for a room iff elected_replica(room) == replica
  std::uint32_t replicas = 1;
  std::uint64_t src_pages = 0;  // pool limits, smallest over the paired buffers
  std::uint64_t dst_pages = 0;

  bool elected(Room room) const { return elected_replica(room, replicas) == replica; }
};

/// Intersects what the two ranks own. Errors (kMismatch) name layer, field and both values: topologies that
/// validate_pair() refuses, a buffer outside its stage or named twice, a layer that only one side has,
/// different bytes per head, a row that does not hold its heads, a page that is no multiple of the DCP
/// interleave, a pool beyond 2^63 bytes. Buffers of layers beyond the model (draft layers) are left alone
/// where only the destination has them and refused at the source.
Result<PairLayout> pair_layout(const ModelGeometry& model, const RankShape& src, const RankShape& dst);

/// One chunk: tokens [begin, end) of the request. `request` is all that moves of it (from decode's prefix to
/// its last token); only CP splits look at it. src_pages[0] holds the row of the first token of its rank
/// at or after src_first_token, and dst_pages likewise; both first tokens are multiples of the side's virtual
/// page (page_size * dcp) and at most `begin`.
struct ChunkRequest {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::uint64_t src_first_token = 0;
  std::uint64_t dst_first_token = 0;
  std::span<const std::uint32_t> src_pages;
  std::span<const std::uint32_t> dst_pages;
  Interval request = {};
};

/// The runs of one chunk. An empty plan (no owned token) is a success. Errors are kInvalid and name needed
/// and given pages, or the page and the pool's limit; nothing is ever cut to fit.
Result<Plan> plan_chunk(const PairLayout& layout, const ChunkRequest& chunk);

}  // namespace kvferry
