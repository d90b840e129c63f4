#include "common/plan/buffer_pairs.h"

#include <algorithm>

#include "common/base/narrow.h"

namespace kvferry {
namespace {

Result<void> check_rows(const ModelGeometry& model, const Side& src, const BufferShape& from, const Side& dst,
                        const BufferShape& into) {
  const std::uint32_t src_needs = rank_row_bytes(model, src.shape.topology, src.shape.coord, from.kind);
  const std::uint32_t dst_needs = rank_row_bytes(model, dst.shape.topology, dst.shape.coord, into.kind);
  if (from.row_bytes == src_needs && into.row_bytes == dst_needs) {
    return {};
  }
  return fail(
      Code::kMismatch,
      "layer {} {}: rows are not what the model makes them: {} has row_bytes {} and needs {} ({} heads), "
      "{} has row_bytes {} and needs {} ({} heads); use the same dtype and head_dim",
      from.layer, to_string(from.kind), src.name, from.row_bytes, src_needs, src.own.heads.size(), dst.name,
      into.row_bytes, dst_needs, dst.own.heads.size());
}

void append(BufferPair pair, std::uint64_t src_offset, std::uint64_t dst_offset, std::uint64_t bytes,
            std::vector<BufferPair>& pairs) {
  if (bytes == 0) {
    return;
  }
  if (!pairs.empty()) {
    BufferPair& last = pairs.back();
    if (last.src_buffer == pair.src_buffer && last.dst_buffer == pair.dst_buffer &&
        last.src_offset + last.bytes == src_offset && last.dst_offset + last.bytes == dst_offset) {
      last.bytes += narrow<std::uint32_t>(bytes);
      return;
    }
  }
  pair.src_offset = narrow<std::uint32_t>(src_offset);
  pair.dst_offset = narrow<std::uint32_t>(dst_offset);
  pair.bytes = narrow<std::uint32_t>(bytes);
  pairs.push_back(pair);
}

/// The elements of a block that rank `rank` of `ranks` has.
Interval shard(std::uint64_t block, std::uint32_t rank, std::uint32_t ranks) {
  const std::uint64_t each = block / ranks;
  return {rank * each, (rank + 1) * each};
}

void append_state(const StateTensor& tensor, const Side& src, const Side& dst, const BufferPair& pair,
                  std::vector<BufferPair>& pairs) {
  const std::uint32_t src_ranks = src.shape.topology.tp;
  const std::uint32_t dst_ranks = dst.shape.topology.tp;
  std::uint64_t src_at = 0;  // elements before this block in the rank's row
  std::uint64_t dst_at = 0;
  for (std::uint32_t outer = 0; outer < tensor.outer; ++outer) {
    for (const std::uint32_t block : tensor.blocks) {
      const Interval mine = shard(block, src.shape.coord.tp, src_ranks);
      const Interval theirs = shard(block, dst.shape.coord.tp, dst_ranks);
      const Interval common = intersect(mine, theirs);
      append(pair, (src_at + common.begin - mine.begin) * tensor.element_bytes,
             (dst_at + common.begin - theirs.begin) * tensor.element_bytes,
             common.size() * tensor.element_bytes, pairs);
      src_at += mine.size();
      dst_at += theirs.size();
    }
  }
}

}  // namespace

std::optional<std::uint32_t> find_buffer(const RankShape& shape, const BufferId& id) {
  const auto found = std::find_if(shape.buffers.begin(), shape.buffers.end(),
                                  [&](const BufferShape& buffer) { return buffer.id() == id; });
  if (found == shape.buffers.end()) {
    return std::nullopt;
  }
  return narrow<std::uint32_t>(found - shape.buffers.begin());
}

Result<void> append_pairs(const ModelGeometry& model, const Side& src, std::uint32_t src_index,
                          const Side& dst, std::uint32_t dst_index, std::vector<BufferPair>& pairs) {
  const BufferShape& from = src.shape.buffers[src_index];
  const BufferShape& into = dst.shape.buffers[dst_index];
  KVF_TRY_VOID(check_rows(model, src, from, dst, into));
  BufferPair pair;
  pair.src_buffer = src_index;
  pair.dst_buffer = dst_index;
  pair.src_row_bytes = from.row_bytes;
  pair.dst_row_bytes = into.row_bytes;
  if (const StateTensor* tensor = model.state_tensor(from.kind); tensor != nullptr) {
    append_state(*tensor, src, dst, pair, pairs);
    return {};
  }
  if (from.kind != BufferKind::kKey && from.kind != BufferKind::kValue) {
    // Every rank has the whole row: it comes with the destination's first head, whose source is elected.
    append(pair, 0, 0, src.own.heads.contains(dst.own.heads.begin) ? from.row_bytes : 0, pairs);
    return {};
  }
  const std::uint64_t head = model.head_bytes(from.kind);
  const Interval common = intersect(src.own.heads, dst.own.heads);
  append(pair, (common.begin - src.own.heads.begin) * head, (common.begin - dst.own.heads.begin) * head,
         common.size() * head, pairs);
  return {};
}

}  // namespace kvferry
