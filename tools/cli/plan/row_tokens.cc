#include "tools/cli/plan/row_tokens.h"

namespace kvferry {

std::uint64_t token_of_row(const TokenClass& owned, std::uint64_t row) {
  std::uint64_t low = row;  // no class owns more than every token
  std::uint64_t high = (row + 1) * owned.count * owned.interleave;
  while (low < high) {
    const std::uint64_t middle = low + (high - low) / 2;
    if (owned.owned_before(middle + 1) > row) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

}  // namespace kvferry
