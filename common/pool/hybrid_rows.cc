#include "common/pool/hybrid_rows.h"

namespace kvferry {
namespace {

Result<void> check_window(const Pool& pool, std::uint64_t virtual_page, Room room, const Interval& window,
                          std::uint64_t end, const HybridRows& rows) {
  const std::uint64_t limit = page_count(pool.layout(), RowSpace::kWindow);
  if (limit == 0) {
    if (!rows.window_pages.empty()) {
      return fail(Code::kInvalid,
                  "room {}: {} window_pages given, but the pool has no sliding-window buffers", room,
                  rows.window_pages.size());
    }
    return {};
  }
  if (rows.window_pages.empty()) {
    if (window.size() > 0) {
      return fail(
          Code::kInvalid,
          "room {}: window_pages is empty, the sliding-window layers need the pages of tokens {} to {}", room,
          window.begin, window.end);
    }
    return {};
  }
  if (rows.window_first % virtual_page != 0 || rows.window_first > end ||
      (window.size() > 0 && rows.window_first > window.begin)) {
    return fail(
        Code::kInvalid,
        "room {}: window_first {} must be a multiple of page_size*dcp = {} and at most the window's first "
        "token {}",
        room, rows.window_first, virtual_page, window.size() > 0 ? window.begin : end);
  }
  const std::uint64_t needed = (end - rows.window_first + virtual_page - 1) / virtual_page;
  if (rows.window_pages.size() != needed) {
    return fail(Code::kInvalid, "room {}: window tokens {} to {} need {} pages of {} tokens, {} given", room,
                rows.window_first, end, needed, virtual_page, rows.window_pages.size());
  }
  for (const std::uint32_t page : rows.window_pages) {
    if (page >= limit) {
      return fail(Code::kInvalid, "room {}: window page {} is outside the pool of {} window pages", room,
                  page, limit);
    }
  }
  return {};
}

}  // namespace

Result<void> check_page_list(const Pool& pool, std::uint64_t virtual_page, Room room, const Interval& tokens,
                             std::size_t given) {
  if (page_count(pool.layout()) == 0) {
    if (given > 0) {
      return fail(Code::kInvalid,
                  "room {}: {} pages given, but the pool has no buffer with a row per token; give none", room,
                  given);
    }
    return {};
  }
  const std::uint64_t needed = (tokens.size() + virtual_page - 1) / virtual_page;
  if (given != needed) {
    return fail(Code::kInvalid, "room {}: tokens {} to {} need {} pages of {} tokens, {} given", room,
                tokens.begin, tokens.end, needed, virtual_page, given);
  }
  return {};
}

Result<void> check_hybrid(const Pool& pool, std::uint64_t virtual_page, Room room, const Interval& window,
                          std::uint64_t end, const HybridRows& rows) {
  KVF_TRY_VOID(check_window(pool, virtual_page, room, window, end, rows));
  const std::uint64_t slots = page_count(pool.layout(), RowSpace::kState);
  if (slots > 0 && !rows.state_slot) {
    return fail(Code::kInvalid, "room {}: state_slot is missing, the pool has recurrent state of {} slots",
                room, slots);
  }
  if (rows.state_slot && *rows.state_slot >= slots) {
    return fail(Code::kInvalid, "room {}: state_slot {} is outside the pool of {} state slots", room,
                *rows.state_slot, slots);
  }
  return {};
}

}  // namespace kvferry
