#include "tests/support/room_memory.h"

#include <fmt/format.h>

#include <algorithm>

#include "tests/support/fabric_fixture.h"

namespace kvferry::test {
namespace {

std::byte content(std::uint64_t use, const BufferShape& shape, std::uint64_t head_byte, std::uint64_t token) {
  const std::uint64_t mixed =
      (use * 1'000'003 + shape.layer * 7919 + static_cast<std::uint64_t>(shape.kind) * 104'729 +
       token * 611'953 + head_byte) *
      0x9E3779B97F4A7C15ull;
  return static_cast<std::byte>(mixed >> 56);
}

/// Calls see(row, token, first byte of the model's row that the rank's row holds) for every row of buffer
/// `index`, until it returns false.
template <class See>
void for_rows(const RoomRank& rank, std::uint32_t index, const RoomRows& rows, const Interval& tokens,
              See&& see) {
  const BufferPlace& place = rank.pool->layout().buffers[index];
  const RankCoord coord = rank.topology.coord(rank.rank);
  if (place.space == RowSpace::kState) {
    if (rows.state_slot) {
      see(std::uint64_t{*rows.state_slot}, std::uint64_t{0}, std::uint64_t{coord.tp} * place.shape.row_bytes);
    }
    return;
  }
  const Ownership mine = ownership(rank.topology, rank.model, coord);
  const TokenClass owned = place.space == RowSpace::kDraft ? TokenClass{} : mine.tokens;
  const std::uint32_t page_size = place.shape.rows_of_page(rank.pool->page_size());
  const bool window = place.space == RowSpace::kWindow;
  const auto& pages = window ? rows.window_pages : rows.pages;
  const std::uint64_t first = window ? rows.window_first : rows.first;
  const Interval span = window ? rows.window : tokens;
  for (std::uint64_t token = span.begin; token < span.end; ++token) {
    if (!owned.owns(token)) {
      continue;
    }
    const std::uint64_t local = owned.owned_before(token) - owned.owned_before(first);
    const std::uint64_t row = std::uint64_t{pages[local / page_size]} * page_size + local % page_size;
    if (!see(row, token, mine.heads.begin * rank.model.head_bytes(place.shape.kind))) {
      return;
    }
  }
}

std::span<std::byte> page_bytes(const Pool& pool, std::uint32_t index, std::uint32_t page) {
  const BufferShape& shape = pool.layout().buffers[index].shape;
  const std::uint64_t bytes = std::uint64_t{shape.rows_of_page(pool.page_size())} * shape.row_bytes;
  return pool.buffer(index).subspan(page * bytes, bytes);
}

bool is_guard(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte value) { return value == kRoomGuard; });
}

}  // namespace

RoomRank make_room_rank(const ModelGeometry& model, const Topology& topology, RankIndex rank,
                        std::uint32_t page_size, std::uint64_t pages) {
  PoolLayout layout;
  layout.rank = rank;
  layout.page_size = page_size;
  std::uint64_t offset = 0;
  const std::uint32_t draft_rows =
      model.draft_layers > 0 ? rows_of_page(RowSpace::kDraft, page_size, topology) : 0;
  for (const BufferShape& shape : rank_buffers(model, topology, topology.coord(rank), pages, draft_rows)) {
    layout.buffers.push_back(BufferPlace{shape, 0, offset});
    offset += shape.pages * shape.rows_of_page(page_size) * shape.row_bytes;
  }
  set_spaces(model, layout);
  layout.aux = {AuxField{"output_ids", 64, kAuxSlots, 1, 0},
                AuxField{kAuxRoomField, 64, kAuxSlots, 1, 64 * kAuxSlots}};
  return {model, topology, rank, make_pool(std::move(layout), kRoomGuard)};
}

bool has_tokens(const RoomRank& rank) {
  return page_count(rank.pool->layout(), RowSpace::kTokens) > 0;
}

bool has_state(const RoomRank& rank) {
  return page_count(rank.pool->layout(), RowSpace::kState) > 0;
}

bool has_window(const RoomRank& rank) {
  return page_count(rank.pool->layout(), RowSpace::kWindow) > 0;
}

Interval layers_of(const RoomRank& rank) {
  Interval out{UINT64_MAX, 0};
  for (const BufferPlace& place : rank.pool->layout().buffers) {
    out = {std::min<std::uint64_t>(out.begin, place.shape.layer),
           std::max<std::uint64_t>(out.end, place.shape.layer + 1)};
  }
  return out;
}

void fill_rows(const RoomRank& rank, const RoomRows& rows, const Interval& tokens, const Interval& layers) {
  for (std::uint32_t index = 0; index < rank.pool->buffer_count(); ++index) {
    const BufferShape& shape = rank.pool->layout().buffers[index].shape;
    const RowSpace space = rank.pool->layout().buffers[index].space;
    if ((space == RowSpace::kTokens || space == RowSpace::kDraft) && !layers.contains(shape.layer)) {
      continue;
    }
    for_rows(rank, index, rows, tokens, [&](std::uint64_t row, std::uint64_t token, std::uint64_t first) {
      for (std::uint64_t byte = 0; byte < shape.row_bytes; ++byte) {
        rank.pool->buffer(index)[row * shape.row_bytes + byte] =
            content(rows.use, shape, first + byte, token);
      }
      return true;
    });
  }
}

std::string wrong_rows(const RoomRank& rank, const RoomRows& rows, const Interval& tokens) {
  std::string wrong;
  for (std::uint32_t index = 0; index < rank.pool->buffer_count() && wrong.empty(); ++index) {
    const BufferShape& shape = rank.pool->layout().buffers[index].shape;
    for_rows(rank, index, rows, tokens, [&](std::uint64_t row, std::uint64_t token, std::uint64_t first) {
      for (std::uint64_t byte = 0; byte < shape.row_bytes; ++byte) {
        if (rank.pool->buffer(index)[row * shape.row_bytes + byte] !=
            content(rows.use, shape, first + byte, token)) {
          wrong = fmt::format("rank {} layer {} {} token {} byte {}", rank.rank, shape.layer,
                              to_string(shape.kind), token, byte);
          return false;
        }
      }
      return true;
    });
  }
  return wrong;
}

void Watch::add(const RoomRank& rank, const RoomRows& rows, int aux_slot) {
  for (const std::uint32_t page : rows.pages) {
    places_.insert({RowSpace::kTokens, page});
    places_.insert({RowSpace::kDraft, page});
  }
  for (const std::uint32_t page : rows.window_pages) {
    places_.insert({RowSpace::kWindow, page});
  }
  if (rows.state_slot) {
    places_.insert({RowSpace::kState, *rows.state_slot});
  }
  if (aux_slot >= 0) {
    aux_slots_.insert(aux_slot);
  }
  std::vector<std::string> ignored;
  check(rank, ignored);
}

void Watch::check(const RoomRank& rank, std::vector<std::string>& violations) {
  const auto look = [&](std::span<std::byte> bytes, std::string_view what, std::uint64_t number) {
    if (!is_guard(bytes)) {
      violations.push_back(
          fmt::format("bytes landed in {} {} of decode rank {} after it went back to the engine", what,
                      number, rank.rank));
      std::fill(bytes.begin(), bytes.end(), kRoomGuard);
    }
  };
  for (std::uint32_t index = 0; index < rank.pool->buffer_count(); ++index) {
    for (const auto& [space, page] : places_) {
      if (rank.pool->layout().buffers[index].space == space) {
        look(page_bytes(*rank.pool, index, page), space == RowSpace::kState ? "state slot" : "page", page);
      }
    }
  }
  for (std::uint32_t field = 0; field < rank.pool->layout().aux.size(); ++field) {
    for (const int slot : aux_slots_) {
      look(rank.pool->aux_row(field, static_cast<std::uint32_t>(slot)), "aux slot",
           static_cast<std::uint64_t>(slot));
    }
  }
}

}  // namespace kvferry::test
