#pragma once
// A plan: which bytes of one prefill rank's pool go where in one decode rank's pool for one chunk. It is the
// product of `runs` (which rows, shared by all layers) and `pairs` (which buffers, which bytes of each row),
// so its size is O(runs) + O(buffers) and never runs times layers. Row r of a buffer lies at base + r *
// row_bytes, because a pool buffer is an array of pages and a page an array of rows: row = page * pitch +
// slot, where the pitch is the rows of a page, or more where something else lies between its pages.
//
// Everything that a request owns is rows: tokens, the draft model's tokens, the tokens of a sliding window,
// the recurrent state (one row). They differ in how rows are counted (RowSpace), so one pair of ranks has one
// layout, and a chunk one plan, per part.

#include <cstdint>
#include <optional>
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
  std::uint64_t pages = 0;      // kState: slots
  std::uint32_t page_rows = 0;  // rows of one page; 0: the pool's page_size
  std::uint32_t pitch = 0;      // rows from one page to the next; 0: page_rows
  friend bool operator==(const BufferShape&, const BufferShape&) = default;

  std::uint32_t rows_of_page(std::uint32_t page_size) const { return page_rows != 0 ? page_rows : page_size; }
  std::uint32_t pitch_of(std::uint32_t page_size) const {
    return pitch != 0 ? pitch : rows_of_page(page_size);
  }
  BufferId id() const { return {layer, kind}; }
};

/// Rows that the buffer spans from its first to its last: (pages - 1) * pitch + page_rows. False where the
/// shape is empty, its pages overlap, or its bytes are beyond 2^63.
bool buffer_rows(const BufferShape& shape, std::uint32_t page_size, std::uint64_t& rows);

/// page_size, times dcp for the draft model, 1 for state.
std::uint32_t rows_of_page(RowSpace space, std::uint32_t page_size, const Topology& topology);

/// One rank's side of a plan.
struct RankShape {
  Topology topology;
  RankCoord coord;
  std::uint32_t page_size = 0;
  std::vector<BufferShape> buffers;
};

/// Buffers of `coord` in pool order, each of `pages` pages without anything between them. The draft model's
/// (on the last stage) come only where `draft_page_rows` says how many rows its pages have: see
/// rows_of_page(). The topology must be valid.
std::vector<BufferShape> rank_buffers(const ModelGeometry& model, const Topology& topology,
                                      const RankCoord& coord, std::uint64_t pages,
                                      std::uint32_t draft_page_rows = 0);

/// Bytes of one row of that buffer on that rank.
std::uint32_t rank_row_bytes(const ModelGeometry& model, const Topology& topology, const RankCoord& coord,
                             BufferKind kind);

/// Everything about one part of one (prefill rank, decode rank) pair that does not change with the room.
struct PairLayout {
  RowSpace space = RowSpace::kTokens;
  std::vector<BufferPair> pairs;  // empty when src never sends to dst, or they share no (layer, head)
  TokenClass src_tokens;
  TokenClass dst_tokens;
  CpPlace src_cp;
  std::uint32_t src_page_size = 0;  // rows of a page
  std::uint32_t dst_page_size = 0;
  std::uint32_t src_pitch = 0;  // rows from page to page
  std::uint32_t dst_pitch = 0;
  std::uint32_t replica = 0;  // this source is elected for a room iff elected_replica(room) == replica
  std::uint32_t replicas = 1;
  std::uint64_t src_pages = 0;  // pool limits, smallest over the paired buffers
  std::uint64_t dst_pages = 0;

  bool elected(Room room) const { return elected_replica(room, replicas) == replica; }
};

/// Intersects what the two ranks own, one layout per part; the first is of the tokens, and has no pairs where
/// the ranks share none. Errors (kMismatch) name layer, field and both values: topologies that
/// validate_pair() refuses, a buffer outside its stage or named twice, a layer that only one side has,
/// different bytes per head, a row that does not hold its heads, a page of the wrong number of rows or no
/// multiple of the DCP interleave, a pool beyond 2^63 bytes. Draft layers move where both sides have them.
/// Buffers of layers beyond those are left alone at the destination and refused at the source.
Result<std::vector<PairLayout>> pair_layouts(const ModelGeometry& model, const RankShape& src,
                                             const RankShape& dst);
/// The first of them, for models that have no other.
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

/// What a request of a hybrid model has on one side beside its pages.
struct HybridRows {
  std::vector<std::uint32_t> window_pages;
  std::uint64_t window_first = 0;  // the token of the first of them
  std::optional<std::uint32_t> state_slot;
  friend bool operator==(const HybridRows&, const HybridRows&) = default;
};

/// Where the rows of one request lie on one side.
struct RequestRows {
  std::span<const std::uint32_t> pages;
  std::uint64_t first_token = 0;  // of pages[0]; a multiple of the virtual page
  std::span<const std::uint32_t> window_pages;
  std::uint64_t window_first = 0;  // likewise
  std::optional<std::uint32_t> state_slot;
};

/// One chunk of a request over all its parts. Windows and state go with the last chunk.
struct PartRequest {
  Interval tokens;           // of the chunk
  Interval request;          // from decode's prefix to its last token
  std::uint32_t window = 0;  // ModelGeometry::sliding_window
  bool last = false;
  RequestRows src;
  RequestRows dst;
};

/// The last tokens of a request that sliding-window layers keep: at most `window` of those that move.
Interval window_of(std::uint32_t window, const Interval& request);

/// plan_chunk() for what `layout` needs of the chunk: its tokens, its window [max(request.begin, request.end
/// - window), tokens.end), or its state. Errors (kInvalid) also name window pages or a state slot that a side
/// did not give.
Result<Plan> plan_part(const PairLayout& layout, const PartRequest& part);

/// The runs of one chunk. An empty plan (no owned token) is a success. Errors are kInvalid and name needed
/// and given pages, or the page and the pool's limit; nothing is ever cut to fit.
Result<Plan> plan_chunk(const PairLayout& layout, const ChunkRequest& chunk);

}  // namespace kvferry
