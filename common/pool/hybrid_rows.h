#pragma once
// What a request of a hybrid model has beside its pages: the pages of its sliding window, and the slot of its
// recurrent state.

#include "common/pool/pool.h"

namespace kvferry {

/// Refuses window pages or a state slot that the pool has no buffers for, that lie outside it, or that it
/// needs and were not given. `window`: the tokens that must be covered, empty when none have to be; the pages
/// then only have to reach from window_first to `end`. kInvalid with the field, both values and the fix.
Result<void> check_hybrid(const Pool& pool, std::uint64_t virtual_page, Room room, const Interval& window,
                          std::uint64_t end, const HybridRows& rows);

}  // namespace kvferry
