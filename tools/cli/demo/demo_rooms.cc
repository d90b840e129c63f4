#include "tools/cli/demo/demo_rooms.h"

#include <algorithm>

#include "tools/engine/protocol.h"

namespace kvferry {

Admission admit(const TraceRequest& request, std::uint64_t hit_tokens, std::uint64_t unit_tokens,
                std::uint64_t pool_tokens) {
  Admission admission;
  admission.tokens = request.input_tokens;
  admission.prefix = std::min(hit_tokens, request.input_tokens) / unit_tokens * unit_tokens;
  if (admission.tokens - admission.prefix > pool_tokens) {
    admission.tokens = admission.prefix + pool_tokens;
    admission.clipped = true;
  }
  return admission;
}

DemoRooms::DemoRooms(const DemoLayout& layout, const PoolSizes& pools, std::uint64_t seed)
    : layout_(layout), random_(seed) {
  for (const Side side : {Side::kPrefill, Side::kDecode}) {
    free_[static_cast<int>(side)].assign(layout.topology(side).dp, pools.pages(side));
  }
}

std::uint64_t& DemoRooms::free_pages(Side side, Room room) {
  auto& groups = free_[static_cast<int>(side)];
  return groups[room % groups.size()];
}

std::optional<Room> DemoRooms::open(std::uint64_t tokens, std::uint64_t prefix) {
  // A full-period sequence over the odd residues, spread over the whole legal range: ids never repeat.
  const std::uint64_t next = random_ + 1;
  const Room room = (next * 0x9E3779B97F4A7C15ull) & kRoomMax;
  for (const Side side : {Side::kPrefill, Side::kDecode}) {
    if (free_pages(side, room) < layout_.pages_for(side, tokens - prefix)) {
      return std::nullopt;
    }
  }
  random_ = next;
  if (!room_is_legal(room)) {
    return open(tokens, prefix);
  }
  for (const Side side : {Side::kPrefill, Side::kDecode}) {
    free_pages(side, room) -= layout_.pages_for(side, tokens - prefix);
  }
  DemoRoom& state = rooms_[room];
  state.room = room;
  state.tokens = tokens;
  state.prefix = prefix;
  return room;
}

std::optional<Room> DemoRooms::on_event(Side side, const nlohmann::json& event, Instant now) {
  const std::string kind = event.value("event", "");
  const auto room = read_number(event, "room", 1, kRoomMax);
  const auto found = room ? rooms_.find(*room) : rooms_.end();
  if (found == rooms_.end()) {
    return std::nullopt;
  }
  DemoRoom& state = found->second;
  state.started = state.started || kind == "started";
  state.granted = state.granted || kind == "granted";
  state.expected = state.expected || kind == "expected";
  const bool landed = kind == "landed";
  if ((!landed && kind != "failed" && kind != "aborted") || state.ending(side)) {
    return std::nullopt;
  }
  if (!state.ending(other(side))) {
    state.first_ending = now;
  }
  state.last_ending = now;
  state.ending(side) = RoomEnding{landed, event.value("reason", ""), event};
  return state.ended() ? std::optional(state.room) : std::nullopt;
}

void DemoRooms::close(Room room) {
  const DemoRoom& state = rooms_.at(room);
  for (const Side side : {Side::kPrefill, Side::kDecode}) {
    free_pages(side, room) += layout_.pages_for(side, state.tokens - state.prefix);
  }
  rooms_.erase(room);
}

void DemoRooms::account(const DemoRoom& room, DemoResults& results) const {
  const nlohmann::json& prefill = room.endings[0]->event;
  const nlohmann::json& decode = room.endings[1]->event;
  const auto number = [](const nlohmann::json& event, const char* field) {
    return event.value(field, std::uint64_t{0});
  };
  const std::uint64_t taken = number(prefill, "transfer_ns");
  const std::uint64_t payload = number(decode, "payload");
  if (room.alone) {
    if (taken > 0) {
      results.alone_rates.push_back(1e9 * static_cast<double>(payload) / static_cast<double>(taken));
    }
    return;
  }
  ++results.landed;
  results.tokens += room.tokens - room.prefix;
  results.bytes += payload;
  results.prefix_hits += room.prefix > 0 ? 1 : 0;
  results.prefix_tokens += room.prefix;
  results.seconds.push_back(static_cast<double>(taken) / 1e9);
  const std::uint64_t at = number(prefill, "at_ns");
  results.active.push_back({at > taken ? at - taken : 0, at});
}

}  // namespace kvferry
