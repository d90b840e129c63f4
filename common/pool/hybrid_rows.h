#pragma once
// What an engine must name of a request, judged by the buffers that its pool has: the pages of the tokens,
// those of the sliding window, and the slot of the recurrent state.

#include "common/pool/pool.h"

namespace kvferry {

/// Refuses a list that does not have exactly the pages of tokens [begin, end): one per virtual page, and none
/// where the pool has no row per token (a PP stage of linear-attention or sliding-window layers only).
Result<void> check_page_list(const Pool& pool, std::uint64_t virtual_page, Room room, const Interval& tokens,
                             std::size_t given);

/// Refuses window pages or a state slot that the pool has no buffers for, that lie outside it, or that it
/// needs and were not given. `window`: the tokens that must be covered, empty when none have to be; the pages
/// then only have to reach from window_first to `end`. kInvalid with the field, both values and the fix.
Result<void> check_hybrid(const Pool& pool, std::uint64_t virtual_page, Room room, const Interval& window,
                          std::uint64_t end, const HybridRows& rows);

}  // namespace kvferry
