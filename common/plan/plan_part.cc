// What each part of a pair takes of a chunk: tokens as they come, window and state with the last chunk.

#include <algorithm>

#include "common/plan/plan.h"

namespace kvferry {
namespace {

/// The last tokens of the request, as far as prefill has computed them.
Result<ChunkRequest> window_chunk(const PartRequest& part) {
  const std::uint64_t begin = window_of(part.window, part.request).begin;
  const std::uint64_t end = std::max(begin, part.tokens.end);
  for (const auto& [side, first] :
       {std::pair{"prefill", part.src.window_first}, {"decode", part.dst.window_first}}) {
    if (begin < end && first > begin) {
      return fail(
          Code::kInvalid,
          "{} window pages begin at token {}, but the window of {} tokens begins at {}; give the pages "
          "from its first token on",
          side, first, part.window, begin);
    }
  }
  return ChunkRequest{begin,
                      end,
                      part.src.window_first,
                      part.dst.window_first,
                      part.src.window_pages,
                      part.dst.window_pages,
                      part.request};
}

}  // namespace

Interval window_of(std::uint32_t window, const Interval& request) {
  return {request.end - std::min<std::uint64_t>(window, request.size()), request.end};
}

Result<Plan> plan_part(const PairLayout& layout, const PartRequest& part) {
  if (layout.pairs.empty()) {
    return Plan{};
  }
  if (layout.space == RowSpace::kTokens || layout.space == RowSpace::kDraft) {
    return plan_chunk(layout, {part.tokens.begin, part.tokens.end, part.src.first_token, part.dst.first_token,
                               part.src.pages, part.dst.pages, part.request});
  }
  if (!part.last) {
    return Plan{};
  }
  if (layout.space == RowSpace::kWindow) {
    KVF_TRY(const ChunkRequest chunk, window_chunk(part));
    return plan_chunk(layout, chunk);
  }
  if (!part.src.state_slot || !part.dst.state_slot) {
    return fail(Code::kInvalid, "the model keeps recurrent state, but {} named no state slot",
                part.src.state_slot ? "decode" : "prefill");
  }
  return plan_chunk(layout, {0, 1, 0, 0, {&*part.src.state_slot, 1}, {&*part.dst.state_slot, 1}, {0, 1}});
}

}  // namespace kvferry
