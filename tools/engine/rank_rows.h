#pragma once
// Which bytes of one rank's pool belong to which (room, layer, kind, head, position): derived from the
// topology alone (layers by PP stage, heads by TP, tokens by DCP), so that filling and checking know nothing
// of plans. One call handles one buffer of one room, which keeps a step short (milliseconds).
// Pure but for the spans it writes; one thread per pool.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "common/base/ids.h"
#include "common/base/result.h"
#include "common/plan/plan.h"
#include "common/topology/topology.h"
#include "tools/engine/row_pieces.h"

namespace kvferry {

/// Tokens [first, end) of a room in `pages`: pages[0] holds the row of the rank's first token at or after
/// `first`, which is a multiple of the virtual page. Likewise the pages of the sliding window, and the row of
/// the recurrent state.
struct RoomRows {
  Room room = 0;
  std::uint64_t first = 0;
  std::uint64_t end = 0;
  std::span<const std::uint32_t> pages;
  std::uint64_t window_first = 0;
  std::span<const std::uint32_t> window_pages = {};
  std::uint32_t state_slot = 0;
};

/// A byte that is not what it must be.
struct Mismatch {
  RankIndex rank = 0;
  std::uint32_t layer = 0;
  BufferKind kind = BufferKind::kLatent;
  bool guard = false;          // the byte lies in a row that nobody may write; head and position are 0 then
  std::uint32_t head = 0;      // global head id
  std::uint64_t position = 0;  // token of the request
  std::uint32_t page = 0;
  std::uint32_t slot = 0;
  std::uint32_t byte = 0;  // into the piece (guard: into the row)
  std::byte expected{};
  std::byte found{};
};

struct RowReport {
  std::uint64_t compared = 0;   // bytes
  std::uint64_t payload = 0;    // bytes of them that belong to tokens of the room
  std::uint64_t differing = 0;  // bytes
  std::vector<Mismatch> first;  // at most one: the first in row order
};

class RankRows {
 public:
  /// `topology` must have passed validate(). `rooms` is how many requests can be alive at once: there are
  /// window pages and state slots for so many. Refuses a row that its pieces do not fill.
  static Result<RankRows> create(const ModelGeometry& model, const Topology& topology, RankIndex rank,
                                 std::uint32_t page_size, std::uint32_t pages, std::uint32_t rooms = 1);

  const std::vector<BufferShape>& buffers() const { return buffers_; }
  /// From the first byte of the buffer's first page to the last of its last.
  std::uint64_t buffer_bytes(std::uint32_t buffer) const;
  /// The buffer between whose pages this one's lie, and how far behind them they begin; none: it lies alone.
  struct Nest {
    std::uint32_t buffer = 0;
    std::uint64_t offset = 0;
  };
  std::optional<Nest> nest(std::uint32_t buffer) const;
  /// Bytes that a nested buffer needs behind the last page of this one.
  std::uint64_t tail_bytes(std::uint32_t buffer) const {
    return std::uint64_t{places_[buffer].pitch - places_[buffer].page_rows} * buffers_[buffer].row_bytes;
  }
  RankIndex rank() const { return rank_; }
  std::uint32_t page_size() const { return page_size_; }
  std::uint64_t virtual_page() const { return virtual_page_; }
  /// Pages of this rank for tokens [first, end); `first` is a multiple of the virtual page. None where its
  /// stage has no row per token.
  std::uint64_t pages_for(std::uint64_t first, std::uint64_t end) const;
  /// The tokens of a request's sliding window: the last ones after the prefix. Empty for other models.
  Interval window(std::uint64_t prefix, std::uint64_t end) const;
  /// The window's first token rounded down to a virtual page.
  std::uint64_t window_first(std::uint64_t prefix, std::uint64_t end) const;
  /// Pages of this rank for the window of a request.
  std::uint64_t window_pages_for(std::uint64_t prefix, std::uint64_t end) const;
  std::uint32_t window_pages() const { return window_pages_; }
  std::uint32_t state_slots() const { return state_slots_; }

  /// Writes the pattern into the rank's rows of `tokens` (a part of rows.first .. rows.end); the state when
  /// they are the last ones.
  void fill(std::span<std::byte> memory, std::uint32_t buffer, const RoomRows& rows,
            const Interval& tokens) const;
  /// Writes the guard pattern into every byte of the room's pages.
  void fill_guard(std::span<std::byte> memory, std::uint32_t buffer, const RoomRows& rows) const;
  /// Compares every byte of the pages: the rank's tokens with their pattern, all other rows with the guard.
  RowReport check(std::span<const std::byte> memory, std::uint32_t buffer, const RoomRows& rows) const;
  /// Inverts one bit of one byte of the rank's copy of `head` of token `position`; false when this rank does
  /// not hold it.
  bool corrupt(std::span<std::byte> memory, std::uint32_t buffer, const RoomRows& rows,
               std::uint64_t position, std::uint32_t head, std::uint32_t byte) const;
  Interval heads() const { return owned_.heads; }

 private:
  /// How the rows of one buffer are found.
  struct Buffer {
    RowSpace space = RowSpace::kTokens;
    TokenClass tokens;
    std::uint32_t page_rows = 0;
    std::uint32_t pitch = 0;
    std::vector<RowPiece> pieces;
  };
  /// The positions that a buffer holds of a room, and the pages that hold them.
  struct Held {
    std::uint64_t first = 0;  // of the pages
    Interval positions;       // that are written
    std::span<const std::uint32_t> pages;
  };

  RankRows() = default;
  Held held(const Buffer& buffer, const RoomRows& rows) const;
  static std::uint64_t pool_row(const Buffer& buffer, std::span<const std::uint32_t> pages,
                                std::uint64_t local_row);
  void check_token(std::span<const std::byte> row, std::uint32_t buffer, const RoomRows& rows,
                   std::uint64_t position, std::uint64_t pool_row, RowReport& report) const;
  void check_guard(std::span<const std::byte> row, std::uint32_t buffer, std::uint64_t pool_row,
                   RowReport& report) const;

  RankIndex rank_ = 0;
  std::uint32_t page_size_ = 0;
  std::uint64_t virtual_page_ = 0;
  bool has_tokens_ = false;
  std::uint32_t window_tokens_ = 0;
  std::uint32_t window_pages_ = 0;
  std::uint32_t state_slots_ = 0;
  Ownership owned_;
  std::vector<BufferShape> buffers_;
  std::vector<Buffer> places_;  // of buffers_
};

}  // namespace kvferry
