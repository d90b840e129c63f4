#include "tools/engine/rank_rows.h"

#include <algorithm>

#include "common/base/check.h"
#include "common/base/narrow.h"
#include "tools/engine/pattern.h"

namespace kvferry {

Result<RankRows> RankRows::create(const ModelGeometry& model, const Topology& topology, RankIndex rank,
                                  std::uint32_t page_size, std::uint32_t pages, std::uint32_t rooms) {
  RankRows rows;
  const RankCoord coord = topology.coord(rank);
  rows.rank_ = rank;
  rows.page_size_ = page_size;
  rows.virtual_page_ = std::uint64_t{page_size} * topology.dcp;
  rows.owned_ = ownership(topology, model, coord);
  rows.buffers_ =
      rank_buffers(model, topology, coord, pages, rows_of_page(RowSpace::kDraft, page_size, topology));
  // What its own stage holds; another may have layers of other kinds.
  const auto has = [&](std::initializer_list<RowSpace> spaces) {
    return std::any_of(rows.buffers_.begin(), rows.buffers_.end(), [&](const BufferShape& shape) {
      return std::find(spaces.begin(), spaces.end(), model.row_space(shape.id())) != spaces.end();
    });
  };
  rows.has_tokens_ = has({RowSpace::kTokens, RowSpace::kDraft});
  if (has({RowSpace::kWindow})) {
    rows.window_tokens_ = model.sliding_window;
    // A window that begins inside a page touches one page more.
    const std::uint64_t each = model.sliding_window / rows.virtual_page_ + 2;
    rows.window_pages_ = narrow<std::uint32_t>(std::min<std::uint64_t>(pages, each * rooms));
  }
  rows.state_slots_ = has({RowSpace::kState}) ? rooms : 0;
  // Index keys and scales share their pages, as engines lay them out: all keys of a page, then all scales.
  const std::uint32_t index_page = page_size * model.index_bytes();
  const std::uint32_t key_bytes = std::max(1u, model.head_bytes(BufferKind::kIndexKey));
  const std::uint32_t stride = (index_page + key_bytes - 1) / key_bytes * key_bytes;
  for (BufferShape& shape : rows.buffers_) {
    Buffer place;
    place.space = model.row_space(shape.id());
    if (place.space == RowSpace::kWindow || place.space == RowSpace::kState) {
      shape.pages = place.space == RowSpace::kWindow ? rows.window_pages_ : rows.state_slots_;
    }
    if (place.space == RowSpace::kTokens &&
        (shape.kind == BufferKind::kIndexKey || shape.kind == BufferKind::kIndexScale)) {
      shape.pitch = stride / shape.row_bytes;
    }
    place.tokens = place.space == RowSpace::kTokens || place.space == RowSpace::kWindow ? rows.owned_.tokens
                                                                                        : TokenClass{};
    place.page_rows = shape.rows_of_page(page_size);
    place.pitch = shape.pitch_of(page_size);
    place.pieces = row_pieces(model, topology, coord, shape.kind);
    const RowPiece& last = place.pieces.empty() ? RowPiece{} : place.pieces.back();
    if (shape.row_bytes == 0 || last.offset + last.bytes != shape.row_bytes) {
      return fail(Code::kInvalid, "rank {}, layer {}, {}: a row of {} bytes does not split into {} pieces",
                  rank, shape.layer, to_string(shape.kind), shape.row_bytes, place.pieces.size());
    }
    rows.places_.push_back(std::move(place));
  }
  return rows;
}

std::uint64_t RankRows::buffer_bytes(std::uint32_t buffer) const {
  std::uint64_t rows = 0;
  KVF_CHECK(buffer_rows(buffers_[buffer], page_size_, rows));
  return rows * buffers_[buffer].row_bytes;
}

std::optional<RankRows::Nest> RankRows::nest(std::uint32_t buffer) const {
  const BufferShape& shape = buffers_[buffer];
  if (shape.kind != BufferKind::kIndexScale || places_[buffer].pitch == places_[buffer].page_rows) {
    return std::nullopt;
  }
  for (std::uint32_t i = 0; i < buffers_.size(); ++i) {
    if (buffers_[i].layer == shape.layer && buffers_[i].kind == BufferKind::kIndexKey) {
      return Nest{i, std::uint64_t{places_[i].page_rows} * buffers_[i].row_bytes};
    }
  }
  return std::nullopt;
}

std::uint64_t RankRows::pages_for(std::uint64_t first, std::uint64_t end) const {
  return has_tokens_ && end > first ? (end - first + virtual_page_ - 1) / virtual_page_ : 0;
}

std::uint64_t RankRows::window_pages_for(std::uint64_t prefix, std::uint64_t end) const {
  const std::uint64_t first = window_first(prefix, end);
  return window_pages_ > 0 && end > first ? (end - first + virtual_page_ - 1) / virtual_page_ : 0;
}

Interval RankRows::window(std::uint64_t prefix, std::uint64_t end) const {
  return {end - std::min<std::uint64_t>(window_tokens_, end - prefix), end};
}

std::uint64_t RankRows::window_first(std::uint64_t prefix, std::uint64_t end) const {
  return window(prefix, end).begin / virtual_page_ * virtual_page_;
}

RankRows::Held RankRows::held(const Buffer& buffer, const RoomRows& rows) const {
  switch (buffer.space) {
    case RowSpace::kWindow:
      return {rows.window_first, window(rows.first, rows.end), rows.window_pages};
    case RowSpace::kState:
      return {0, {0, 1}, {&rows.state_slot, 1}};
    case RowSpace::kTokens:
    case RowSpace::kDraft:
      break;
  }
  return {rows.first, {rows.first, rows.end}, rows.pages};
}

std::uint64_t RankRows::pool_row(const Buffer& buffer, std::span<const std::uint32_t> pages,
                                 std::uint64_t local_row) {
  const std::uint64_t index = local_row / buffer.page_rows;
  KVF_CHECK(index < pages.size());
  return std::uint64_t{pages[index]} * buffer.pitch + local_row % buffer.page_rows;
}

void RankRows::fill(std::span<std::byte> memory, std::uint32_t buffer, const RoomRows& rows,
                    const Interval& tokens) const {
  const BufferShape& shape = buffers_[buffer];
  const Buffer& place = places_[buffer];
  const Held held_rows = held(place, rows);
  Interval positions = intersect(tokens, held_rows.positions);
  if (place.space == RowSpace::kState) {
    positions = tokens.end == rows.end ? held_rows.positions : Interval{};
  }
  std::uint64_t local =
      place.tokens.owned_before(positions.begin) - place.tokens.owned_before(held_rows.first);
  PieceCoordinate piece{.room = rows.room, .layer = shape.layer, .kind = shape.kind};
  for (piece.position = positions.begin; piece.position < positions.end; ++piece.position) {
    if (!place.tokens.owns(piece.position)) {
      continue;
    }
    auto row = memory.subspan(pool_row(place, held_rows.pages, local) * shape.row_bytes, shape.row_bytes);
    for (const RowPiece& part : place.pieces) {
      piece.head = part.id;
      fill_pattern(row.subspan(part.offset, part.bytes), piece_seed(piece));
    }
    ++local;
  }
}

void RankRows::fill_guard(std::span<std::byte> memory, std::uint32_t buffer, const RoomRows& rows) const {
  const BufferShape& shape = buffers_[buffer];
  const Buffer& place = places_[buffer];
  const auto pages = held(place, rows).pages;
  for (std::uint64_t local = 0; local < pages.size() * place.page_rows; ++local) {
    const std::uint64_t row = pool_row(place, pages, local);
    fill_pattern(memory.subspan(row * shape.row_bytes, shape.row_bytes),
                 guard_seed({.rank = rank_, .buffer = buffer, .row = row}));
  }
}

RowReport RankRows::check(std::span<const std::byte> memory, std::uint32_t buffer,
                          const RoomRows& rows) const {
  const BufferShape& shape = buffers_[buffer];
  const Buffer& place = places_[buffer];
  const Held held_rows = held(place, rows);
  RowReport report;
  const auto row_at = [&](std::uint64_t row) {
    return memory.subspan(row * shape.row_bytes, shape.row_bytes);
  };
  // Rows of the pages before and after the positions that move belong to nobody.
  std::uint64_t local = 0;
  for (std::uint64_t position = held_rows.first; position < held_rows.positions.end; ++position) {
    if (place.tokens.owns(position)) {
      const std::uint64_t row = pool_row(place, held_rows.pages, local++);
      if (position < held_rows.positions.begin) {
        check_guard(row_at(row), buffer, row, report);
      } else {
        check_token(row_at(row), buffer, rows, position, row, report);
      }
    }
  }
  for (; local < held_rows.pages.size() * place.page_rows; ++local) {
    const std::uint64_t row = pool_row(place, held_rows.pages, local);
    check_guard(row_at(row), buffer, row, report);
  }
  return report;
}

void RankRows::check_token(std::span<const std::byte> row, std::uint32_t buffer, const RoomRows& rows,
                           std::uint64_t position, std::uint64_t pool_row, RowReport& report) const {
  const BufferShape& shape = buffers_[buffer];
  const Buffer& place = places_[buffer];
  for (const RowPiece& part : place.pieces) {
    const PatternCheck found =
        check_pattern(row.subspan(part.offset, part.bytes),
                      piece_seed({rows.room, shape.layer, shape.kind, part.id, position}));
    if (found.differing != 0 && report.first.empty()) {
      report.first.push_back({.rank = rank_,
                              .layer = shape.layer,
                              .kind = shape.kind,
                              .head = part.id,
                              .position = position,
                              .page = narrow<std::uint32_t>(pool_row / place.pitch),
                              .slot = narrow<std::uint32_t>(pool_row % place.pitch),
                              .byte = narrow<std::uint32_t>(found.first),
                              .expected = found.expected,
                              .found = found.found});
    }
    report.differing += found.differing;
  }
  report.compared += row.size();
  report.payload += row.size();
}

void RankRows::check_guard(std::span<const std::byte> row, std::uint32_t buffer, std::uint64_t pool_row,
                           RowReport& report) const {
  const BufferShape& shape = buffers_[buffer];
  const PatternCheck found =
      check_pattern(row, guard_seed({.rank = rank_, .buffer = buffer, .row = pool_row}));
  if (found.differing != 0 && report.first.empty()) {
    report.first.push_back({.rank = rank_,
                            .layer = shape.layer,
                            .kind = shape.kind,
                            .guard = true,
                            .page = narrow<std::uint32_t>(pool_row / places_[buffer].pitch),
                            .slot = narrow<std::uint32_t>(pool_row % places_[buffer].pitch),
                            .byte = narrow<std::uint32_t>(found.first),
                            .expected = found.expected,
                            .found = found.found});
  }
  report.differing += found.differing;
  report.compared += row.size();
}

bool RankRows::corrupt(std::span<std::byte> memory, std::uint32_t buffer, const RoomRows& rows,
                       std::uint64_t position, std::uint32_t head, std::uint32_t byte) const {
  if (buffer >= buffers_.size()) {
    return false;
  }
  const Buffer& place = places_[buffer];
  const Held held_rows = held(place, rows);
  if (!held_rows.positions.contains(position) || !place.tokens.owns(position)) {
    return false;
  }
  const BufferShape& shape = buffers_[buffer];
  const std::uint64_t local =
      place.tokens.owned_before(position) - place.tokens.owned_before(held_rows.first);
  const std::uint64_t row = pool_row(place, held_rows.pages, local);
  for (const RowPiece& part : place.pieces) {
    if (part.id == head) {
      memory[row * shape.row_bytes + part.offset + byte % part.bytes] ^= std::byte{0x10};
      return true;
    }
  }
  return false;
}

}  // namespace kvferry
