// The buffers of one rank: which there are, how wide their rows, how many rows their pages have.
#include "common/base/narrow.h"
#include "common/plan/plan.h"

namespace kvferry {
namespace {
// All addresses and byte counts stay below this, so that signed arithmetic elsewhere cannot overflow either.
constexpr std::uint64_t kBytesMax = (std::uint64_t{1} << 63) - 1;
}  // namespace

bool buffer_rows(const BufferShape& shape, std::uint32_t page_size, std::uint64_t& rows) {
  const std::uint64_t page_rows = shape.rows_of_page(page_size);
  const std::uint64_t pitch = shape.pitch_of(page_size);
  if (shape.pages == 0 || shape.row_bytes == 0 || page_rows == 0 || pitch < page_rows ||
      __builtin_mul_overflow(shape.pages - 1, pitch, &rows) ||
      __builtin_add_overflow(rows, page_rows, &rows)) {
    return false;
  }
  return rows <= kBytesMax / shape.row_bytes;
}

std::uint32_t rows_of_page(RowSpace space, std::uint32_t page_size, const Topology& topology) {
  switch (space) {
    case RowSpace::kTokens:
    case RowSpace::kWindow:
      return page_size;
    case RowSpace::kDraft:
      return page_size * topology.dcp;
    case RowSpace::kState:
      return 1;
  }
  return 0;
}

std::uint32_t rank_row_bytes(const ModelGeometry& model, const Topology& topology, const RankCoord& coord,
                             BufferKind kind) {
  if (const StateTensor* tensor = model.state_tensor(kind); tensor != nullptr) {
    return narrow<std::uint32_t>(tensor->outer * tensor->elements() * tensor->element_bytes / topology.tp);
  }
  const bool per_head = kind == BufferKind::kKey || kind == BufferKind::kValue;
  const std::uint64_t heads = per_head ? ownership(topology, model, coord).heads.size() : 1;
  return narrow<std::uint32_t>(heads * model.head_bytes(kind));
}

std::vector<BufferShape> rank_buffers(const ModelGeometry& model, const Topology& topology,
                                      const RankCoord& coord, std::uint64_t pages,
                                      std::uint32_t draft_page_rows) {
  const Ownership own = ownership(topology, model, coord);
  std::vector<BufferShape> buffers;
  for (const BufferId& id : model.pool_buffers(draft_page_rows != 0)) {
    if (!own.has_layer(model, id.layer)) {
      continue;
    }
    const RowSpace space = model.row_space(id);
    BufferShape shape{id.layer, id.kind, rank_row_bytes(model, topology, coord, id.kind), pages};
    if (space == RowSpace::kDraft || space == RowSpace::kState) {
      shape.page_rows = space == RowSpace::kDraft ? draft_page_rows : 1;
    }
    buffers.push_back(shape);
  }
  return buffers;
}

}  // namespace kvferry
