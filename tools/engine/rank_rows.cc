#include "tools/engine/rank_rows.h"

#include "common/base/check.h"
#include "common/base/narrow.h"
#include "tools/engine/pattern.h"

namespace kvferry {

Result<RankRows> RankRows::create(const ModelGeometry& model, const Topology& topology, RankIndex rank,
                                  std::uint32_t page_size, std::uint32_t pages) {
  RankRows rows;
  const RankCoord coord = topology.coord(rank);
  rows.rank_ = rank;
  rows.page_size_ = page_size;
  rows.virtual_page_ = std::uint64_t{page_size} * topology.dcp;
  rows.owned_ = ownership(topology, model, coord);
  rows.buffers_ = rank_buffers(model, topology, coord, pages);
  for (const BufferShape& buffer : rows.buffers_) {
    const std::uint64_t heads = rows.owned_.heads.size();
    if (heads == 0 || buffer.row_bytes == 0 || buffer.row_bytes % heads != 0) {
      return fail(Code::kInvalid, "rank {}, layer {}, {}: a row of {} bytes does not split into {} heads",
                  rank, buffer.layer, to_string(buffer.kind), buffer.row_bytes, heads);
    }
  }
  return rows;
}

std::uint64_t RankRows::buffer_bytes(std::uint32_t buffer) const {
  return buffers_[buffer].pages * page_size_ * buffers_[buffer].row_bytes;
}

std::uint64_t RankRows::pages_for(std::uint64_t first, std::uint64_t end) const {
  return end > first ? (end - first + virtual_page_ - 1) / virtual_page_ : 0;
}

std::uint64_t RankRows::pool_row(std::span<const std::uint32_t> pages, std::uint64_t local_row) const {
  const std::uint64_t index = local_row / page_size_;
  KVF_CHECK(index < pages.size());
  return std::uint64_t{pages[index]} * page_size_ + local_row % page_size_;
}

void RankRows::fill(std::span<std::byte> memory, std::uint32_t buffer, const RoomRows& rows,
                    const Interval& tokens) const {
  const BufferShape& shape = buffers_[buffer];
  const std::uint64_t head_bytes = shape.row_bytes / owned_.heads.size();
  std::uint64_t local = owned_.tokens.owned_before(tokens.begin) - owned_.tokens.owned_before(rows.first);
  PieceCoordinate piece{.room = rows.room, .layer = shape.layer, .kind = shape.kind};
  for (piece.position = tokens.begin; piece.position < tokens.end; ++piece.position) {
    if (!owned_.tokens.owns(piece.position)) {
      continue;
    }
    auto row = memory.subspan(pool_row(rows.pages, local) * shape.row_bytes, shape.row_bytes);
    for (std::uint64_t head = owned_.heads.begin; head < owned_.heads.end; ++head) {
      piece.head = narrow<std::uint32_t>(head);
      fill_pattern(row.subspan((head - owned_.heads.begin) * head_bytes, head_bytes), piece_seed(piece));
    }
    ++local;
  }
}

void RankRows::fill_guard(std::span<std::byte> memory, std::uint32_t buffer,
                          std::span<const std::uint32_t> pages) const {
  const BufferShape& shape = buffers_[buffer];
  for (std::uint64_t local = 0; local < pages.size() * page_size_; ++local) {
    const std::uint64_t row = pool_row(pages, local);
    fill_pattern(memory.subspan(row * shape.row_bytes, shape.row_bytes),
                 guard_seed({.rank = rank_, .buffer = buffer, .row = row}));
  }
}

RowReport RankRows::check(std::span<const std::byte> memory, std::uint32_t buffer,
                          const RoomRows& rows) const {
  const BufferShape& shape = buffers_[buffer];
  RowReport report;
  std::uint64_t local = 0;
  const auto row_at = [&](std::uint64_t row) {
    return memory.subspan(row * shape.row_bytes, shape.row_bytes);
  };
  for (std::uint64_t position = rows.first; position < rows.end; ++position) {
    if (owned_.tokens.owns(position)) {
      const std::uint64_t row = pool_row(rows.pages, local++);
      check_token(row_at(row), buffer, rows, position, row, report);
    }
  }
  for (; local < rows.pages.size() * page_size_; ++local) {
    const std::uint64_t row = pool_row(rows.pages, local);
    check_guard(row_at(row), buffer, row, report);
  }
  return report;
}

void RankRows::check_token(std::span<const std::byte> row, std::uint32_t buffer, const RoomRows& rows,
                           std::uint64_t position, std::uint64_t pool_row, RowReport& report) const {
  const BufferShape& shape = buffers_[buffer];
  const std::uint64_t head_bytes = row.size() / owned_.heads.size();
  for (std::uint64_t head = owned_.heads.begin; head < owned_.heads.end; ++head) {
    const auto id = narrow<std::uint32_t>(head);
    const PatternCheck found =
        check_pattern(row.subspan((head - owned_.heads.begin) * head_bytes, head_bytes),
                      piece_seed({rows.room, shape.layer, shape.kind, id, position}));
    if (found.differing != 0 && report.first.empty()) {
      report.first.push_back({.rank = rank_,
                              .layer = shape.layer,
                              .kind = shape.kind,
                              .head = id,
                              .position = position,
                              .page = narrow<std::uint32_t>(pool_row / page_size_),
                              .slot = narrow<std::uint32_t>(pool_row % page_size_),
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
                            .page = narrow<std::uint32_t>(pool_row / page_size_),
                            .slot = narrow<std::uint32_t>(pool_row % page_size_),
                            .byte = narrow<std::uint32_t>(found.first),
                            .expected = found.expected,
                            .found = found.found});
  }
  report.differing += found.differing;
  report.compared += row.size();
}

bool RankRows::corrupt(std::span<std::byte> memory, std::uint32_t buffer, const RoomRows& rows,
                       std::uint64_t position, std::uint32_t head, std::uint32_t byte) const {
  if (buffer >= buffers_.size() || position < rows.first || position >= rows.end ||
      !owned_.tokens.owns(position) || !owned_.heads.contains(head)) {
    return false;
  }
  const BufferShape& shape = buffers_[buffer];
  const std::uint64_t head_bytes = shape.row_bytes / owned_.heads.size();
  const std::uint64_t local = owned_.tokens.owned_before(position) - owned_.tokens.owned_before(rows.first);
  const std::uint64_t row = pool_row(rows.pages, local);
  memory[row * shape.row_bytes + (head - owned_.heads.begin) * head_bytes + byte % head_bytes] ^=
      std::byte{0x10};
  return true;
}

}  // namespace kvferry
