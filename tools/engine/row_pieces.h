#pragma once
// What one row of a buffer is made of: heads, or the elements of a recurrent tensor that the rank has. Each
// piece has an id that is the same on every rank and side, so a piece can be checked wherever it went.

#include <cstdint>
#include <vector>

#include "common/model/geometry.h"
#include "common/topology/topology.h"

namespace kvferry {

struct RowPiece {
  std::uint32_t id = 0;  // global head; state: (outer * elements of the whole tensor) + element
  std::uint32_t offset = 0;
  std::uint32_t bytes = 0;
};

/// The pieces of a row of `kind` on the rank, in row order, without gaps.
std::vector<RowPiece> row_pieces(const ModelGeometry& model, const Topology& topology, const RankCoord& coord,
                                 BufferKind kind);

}  // namespace kvferry
