#include "tools/engine/room_parts.h"

#include <algorithm>
#include <utility>

#include "common/base/narrow.h"

namespace kvferry {

bool RoomState::ended() const {
  return std::all_of(parts.begin(), parts.end(), [](const RoomPart& part) { return part.ended; });
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
    const std::uint64_t need = rank.rows.pages_for(state.prefix, state.tokens);
    auto pages = need <= rank.pages.total() ? rank.pages.allocate(narrow<std::uint32_t>(need)) : std::nullopt;
    auto slot = rank.slots.allocate(1);
    if (!pages || !slot) {
      const Error error{
          Code::kExhausted,
          fmt::format("room {} needs {} pages and an aux slot on rank {}, which has {} of {} pages and "
                      "{} of {} slots free",
                      state.room, need, rank.index(), rank.pages.free_count() + (pages ? need : 0),
                      rank.pages.total(), rank.slots.free_count() + (slot ? 1 : 0), rank.slots.total())};
      rank.release(pages.value_or(std::vector<std::uint32_t>{}),
                   slot ? narrow<std::int32_t>(slot->front()) : -1);
      std::for_each(state.parts.begin(), state.parts.end(), end_part);
      return fail(error);
    }
    state.parts.push_back(
        {.rank = &rank, .pages = std::move(*pages), .slot = narrow<std::int32_t>(slot->front())});
  }
  if (state.parts.empty()) {
    return fail(Code::kInvalid, "room {}: no rank of its DP group ({} of {}) is in this process", state.room,
                state.room % dp_size, dp_size);
  }
  return {};
}

void end_part(RoomPart& part) {
  if (!part.ended) {
    part.rank->release(part.pages, part.slot);
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
    part.rank->quarantine(std::move(part.pages), part.slot);
    part.ended = true;
  } else {
    end_part(part);
  }
  fail_room(state, Error{Code::kUnavailable, reason});
}

}  // namespace kvferry
