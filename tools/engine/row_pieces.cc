#include "tools/engine/row_pieces.h"

#include "common/base/narrow.h"

namespace kvferry {
namespace {

std::vector<RowPiece> state_pieces(const StateTensor& tensor, std::uint32_t ranks, std::uint32_t rank) {
  std::vector<RowPiece> pieces;
  std::uint32_t offset = 0;
  for (std::uint32_t outer = 0; outer < tensor.outer; ++outer) {
    std::uint64_t block_begin = outer * tensor.elements();
    for (const std::uint32_t block : tensor.blocks) {
      for (std::uint32_t element = 0; element < block; ++element) {
        if (element / (block / ranks) == rank) {
          pieces.push_back({narrow<std::uint32_t>(block_begin + element), offset, tensor.element_bytes});
          offset += tensor.element_bytes;
        }
      }
      block_begin += block;
    }
  }
  return pieces;
}

}  // namespace

std::vector<RowPiece> row_pieces(const ModelGeometry& model, const Topology& topology, const RankCoord& coord,
                                 BufferKind kind) {
  if (const StateTensor* tensor = model.state_tensor(kind); tensor != nullptr) {
    return state_pieces(*tensor, topology.tp, coord.tp);
  }
  const std::uint32_t bytes = model.head_bytes(kind);
  if (kind != BufferKind::kKey && kind != BufferKind::kValue) {
    return {{0, 0, bytes}};
  }
  const Interval heads = ownership(topology, model, coord).heads;
  std::vector<RowPiece> pieces;
  for (std::uint64_t head = heads.begin; head < heads.end; ++head) {
    pieces.push_back(
        {narrow<std::uint32_t>(head), narrow<std::uint32_t>((head - heads.begin) * bytes), bytes});
  }
  return pieces;
}

}  // namespace kvferry
