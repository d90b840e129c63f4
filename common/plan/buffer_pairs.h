#pragma once
// Which bytes of a row two ranks share: heads by interval, recurrent state by the blocks of its tensor.

#include <optional>
#include <string_view>
#include <vector>

#include "common/plan/plan.h"

namespace kvferry {

/// One side with what it owns, and its name for messages.
struct Side {
  std::string_view name;
  const RankShape& shape;
  Ownership own;
};

std::optional<std::uint32_t> find_buffer(const RankShape& shape, const BufferId& id);

/// Appends the slices of buffer `src_index` that buffer `dst_index` takes; both hold the same layer and kind.
/// Slices that continue each other on both sides are one. kMismatch where a row is not as wide as the model
/// and the topology make it, naming both.
Result<void> append_pairs(const ModelGeometry& model, const Side& src, std::uint32_t src_index,
                          const Side& dst, std::uint32_t dst_index, std::vector<BufferPair>& pairs);

}  // namespace kvferry
