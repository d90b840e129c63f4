#include "tools/engine/room_parts.h"

#include <algorithm>
#include <utility>

namespace kvferry {

bool RoomState::ended() const {
  return std::all_of(parts.begin(), parts.end(), [](const RoomPart& part) { return part.ended; });
}

RoomRows RoomState::rows(const RoomPart& part) const {
  return {room,
          prefix,
          tokens,
          part.held.pages,
          part.rank->rows.window_first(prefix, tokens),
          part.held.window_pages,
          static_cast<std::uint32_t>(std::max(part.held.state_slot, 0))};
}

kvf_hybrid RoomState::hybrid(const RoomPart& part) const {
  kvf_hybrid out{};
  out.window_pages = part.held.window_pages.data();
  out.window_page_count = part.held.window_pages.size();
  out.window_first = part.held.window_pages.empty() ? 0 : part.rank->rows.window_first(prefix, tokens);
  out.has_state = part.held.state_slot >= 0 ? 1 : 0;
  out.state_slot = static_cast<std::uint32_t>(std::max(part.held.state_slot, 0));
  return out;
}

RoomPart* RoomState::part_of(const Rank& rank) {
  const auto found =
      std::find_if(parts.begin(), parts.end(), [&](const RoomPart& part) { return part.rank == &rank; });
  return found == parts.end() ? nullptr : &*found;
}

Result<void> allocate_parts(RoomState& state, std::span<Rank> ranks, std::uint32_t dp_size) {
  for (Rank& rank : ranks) {
    if (rank.coord().dp != state.room % dp_size) {
      continue;
    }
    auto held = rank.allocate(state.room, state.prefix, state.tokens);
    if (!held) {
      std::for_each(state.parts.begin(), state.parts.end(), end_part);
      return fail(std::move(held).error());
    }
    state.parts.push_back({.rank = &rank, .held = *std::move(held)});
  }
  if (state.parts.empty()) {
    return fail(Code::kInvalid, "room {}: no rank of its DP group ({} of {}) is in this process", state.room,
                state.room % dp_size, dp_size);
  }
  return {};
}

void end_part(RoomPart& part) {
  if (!part.ended) {
    part.rank->release(part.held);
    part.ended = true;
  }
}

void fail_room(RoomState& state, Error error) {
  if (state.failure) {
    return;
  }
  state.failure = std::move(error);
  for (RoomPart& part : state.parts) {
    if (part.ended) {
      continue;
    }
    if (!part.accepted) {
      end_part(part);
    } else if (part.rank->attached()) {
      // A refusal means that the daemon has ended the room already; its final event is on the way.
      kvf_abort(part.rank->engine(), state.room, state.failure->message.c_str());
    }
  }
}

void lose_part(RoomState& state, RoomPart& part, const std::string& reason) {
  if (part.ended) {
    return;
  }
  if (part.accepted) {
    part.rank->quarantine(std::move(part.held));
    part.ended = true;
  } else {
    end_part(part);
  }
  fail_room(state, Error{Code::kUnavailable, reason});
}

}  // namespace kvferry
