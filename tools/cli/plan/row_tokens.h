#pragma once
// From a row back to its token.

#include <cstdint>

#include "common/topology/topology.h"

namespace kvferry {

/// The owned token that has `row` owned tokens before it: the inverse of TokenClass::owned_before(), found by
/// searching in it. Rows below 2^40.
std::uint64_t token_of_row(const TokenClass& owned, std::uint64_t row);

}  // namespace kvferry
