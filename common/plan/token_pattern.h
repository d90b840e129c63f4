#pragma once
// Which tokens two DCP classes share, as a repeating pattern. Two classes of the same interleave share at
// most one piece per period (the Chinese remainder theorem); different interleaves share several.

#include <cstdint>
#include <vector>

#include "common/topology/topology.h"

namespace kvferry {

struct TokenPattern {
  /// Tokens [begin + k*period, begin + k*period + length) for every k >= 0; within one piece both sides' rows
  /// are consecutive.
  struct Piece {
    std::uint64_t begin = 0;
    std::uint64_t length = 0;
  };
  std::uint64_t period = 1;
  std::vector<Piece> pieces;  // ascending, not adjacent; empty when the classes never meet
};

/// The tokens that `a` and `b` both own. Counts and interleaves must be within the limits of topology.h.
TokenPattern token_pattern(const TokenClass& a, const TokenClass& b);

}  // namespace kvferry
