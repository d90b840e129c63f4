#include "tools/engine/decode_role.h"

#include <algorithm>
#include <utility>

#include "common/base/narrow.h"
#include "tools/engine/protocol.h"

namespace kvferry {
namespace {

constexpr std::uint64_t kTokensMax = 100'000'000;
constexpr std::chrono::milliseconds kRetry{2};

nlohmann::json describe(const Mismatch& mismatch) {
  return {{"rank", mismatch.rank},
          {"layer", mismatch.layer},
          {"kind", to_string(mismatch.kind)},
          {"guard", mismatch.guard},
          {"head", mismatch.head},
          {"position", mismatch.position},
          {"page", mismatch.page},
          {"slot", mismatch.slot},
          {"byte", mismatch.byte},
          {"expected", static_cast<unsigned>(mismatch.expected)},
          {"found", static_cast<unsigned>(mismatch.found)}};
}

}  // namespace

Result<void> DecodeRole::on_command(const std::string& op, const nlohmann::json& command) {
  if (op == "expect") {
    return expect(command);
  }
  if (op != "abort") {
    return fail(Code::kInvalid, "field op: {} is not expect, abort, stats or quit", op);
  }
  KVF_TRY(const Room room, read_number(command, "room", 1, kRoomMax));
  KVF_TRY(std::string reason, read_text(command, "reason"));
  const auto found = rooms_.find(room);
  if (found != rooms_.end()) {
    fail_room(found->second.state, Error{Code::kAborted, std::move(reason)});
    finish(room);
  }
  return {};
}

Result<void> DecodeRole::expect(const nlohmann::json& command) {
  Expectation expectation;
  KVF_TRY(expectation.state.room, read_number(command, "room", 1, kRoomMax));
  KVF_TRY(expectation.state.tokens, read_number(command, "tokens", 1, kTokensMax));
  KVF_TRY(expectation.state.prefix, read_number(command, "prefix", 0, expectation.state.tokens));
  KVF_TRY(expectation.bootstrap, read_text(command, "bootstrap"));
  const Room room = expectation.state.room;
  if (rooms_.contains(room)) {
    return fail(Code::kConflict, "room {} is alive already", room);
  }
  for (const Rank& rank : ranks_) {
    if (expectation.state.prefix % rank.rows.virtual_page() != 0) {
      return fail(Code::kInvalid, "prefix {} must be a multiple of the virtual page {}",
                  expectation.state.prefix, rank.rows.virtual_page());
    }
  }
  KVF_TRY_VOID(allocate_parts(expectation.state, ranks_, options_.dp_size));
  rooms_.emplace(room, std::move(expectation));
  turns_.push_back(room);
  return {};
}

bool DecodeRole::waits_for_retry() const {
  return std::any_of(rooms_.begin(), rooms_.end(), [](const auto& entry) {
    return !entry.second.state.failure && entry.second.guarded() &&
           entry.second.next_expect < entry.second.state.parts.size();
  });
}

bool DecodeRole::work(Instant now) {
  for (std::size_t tried = 0; tried < turns_.size(); ++tried) {
    const Room id = turns_.front();
    turns_.pop_front();
    turns_.push_back(id);
    Expectation& room = rooms_.at(id);
    if (!room.landed.empty()) {
      check_step(room);
      return true;
    }
    if (room.state.failure) {
      continue;
    }
    if (!room.guarded()) {
      guard_step(room);
      return true;
    }
    if (room.next_expect < room.state.parts.size() && now >= room.retry_at && expect_step(room, now)) {
      return true;
    }
  }
  return false;
}

void DecodeRole::guard_step(Expectation& room) {
  RoomPart& part = room.state.parts[room.guard_part];
  Rank& rank = *part.rank;
  rank.rows.fill_guard(rank.memory.buffer(room.guard_buffer), room.guard_buffer, room.state.rows(part));
  if (++room.guard_buffer == rank.rows.buffers().size()) {
    clear_aux(rank.memory, narrow<std::uint32_t>(part.held.slot));
    room.guard_buffer = 0;
    ++room.guard_part;
  }
}

// True when a daemon has accepted the room (or the room has just failed).
bool DecodeRole::expect_step(Expectation& room, Instant now) {
  RoomPart& part = room.state.parts[room.next_expect];
  kvf_expectation expectation{};
  expectation.struct_size = sizeof(expectation);
  expectation.room = room.state.room;
  expectation.bootstrap = room.bootstrap.c_str();
  expectation.pages = part.held.pages.data();
  expectation.page_count = part.held.pages.size();
  expectation.prefix = room.state.prefix;
  expectation.token_count = room.state.tokens;
  expectation.aux_slot = part.held.slot;
  expectation.prefill_dp_rank = -1;
  expectation.hybrid = room.state.hybrid(part);
  const int code = part.rank->attached() ? kvf_expect(part.rank->engine(), &expectation) : -KVF_UNAVAILABLE;
  if (try_again_later(code)) {
    room.retry_at = now + kRetry;
    return false;
  }
  if (code != 0) {
    fail_room(room.state, refusal(*part.rank, "kvf_expect", code));
    finish(room.state.room);
    return true;
  }
  part.accepted = true;
  if (++room.next_expect == room.state.parts.size()) {
    sink_.emit({{"event", "expected"}, {"room", room.state.room}});
  }
  return true;
}

void DecodeRole::on_event(Rank& rank, const kvf_event& event, Instant now) {
  const auto found = rooms_.find(event.room);
  RoomPart* part = found == rooms_.end() ? nullptr : found->second.state.part_of(rank);
  if (part == nullptr || part->ended || !part->accepted) {
    report_stray(sink_, rank, event);
    return;
  }
  if (event.type == KVF_EVENT_LANDED) {
    on_landed(found->second, *part, event, now);
  } else if (event.type == KVF_EVENT_FAILED || event.type == KVF_EVENT_ABORTED) {
    end_part(*part);
    fail_room(found->second.state, event_error(event));
  }
  finish(event.room);
}

void DecodeRole::on_landed(Expectation& room, RoomPart& part, const kvf_event& event, Instant now) {
  const auto at = std::chrono::duration_cast<std::chrono::nanoseconds>(now.time_since_epoch()).count();
  room.landed_at_ns = narrow<std::uint64_t>(at);
  part.bytes = event.bytes;
  part.transfer_ns = event.transfer_ns;
  if (event.tokens != room.state.tokens) {
    end_part(part);
    fail_room(room.state,
              Error{Code::kCorrupt, fmt::format("rank {} landed with {} tokens where {} were expected",
                                                part.rank->index(), event.tokens, room.state.tokens)});
    return;
  }
  // The pages are the engine's again, but a second final event for the room must find the part busy.
  part.accepted = false;
  if (room.state.failure) {
    end_part(part);
    return;
  }
  room.landed.push_back(static_cast<std::size_t>(&part - room.state.parts.data()));
}

void DecodeRole::check_step(Expectation& room) {
  RoomPart& part = room.state.parts[room.landed.front()];
  Rank& rank = *part.rank;
  if (!part.ended) {
    const RowReport found =
        rank.rows.check(rank.memory.buffer(room.check_buffer), room.check_buffer, room.state.rows(part));
    room.report.compared += found.compared;
    room.report.payload += found.payload;
    room.report.differing += found.differing;
    if (room.report.first.empty()) {
      room.report.first = found.first;
    }
    if (++room.check_buffer < rank.rows.buffers().size()) {
      return;
    }
    const AuxReport aux = check_aux(rank.memory, narrow<std::uint32_t>(part.held.slot), room.state.room);
    room.aux.compared += aux.compared;
    room.aux.differing += aux.differing;
    if (room.aux.first.empty() && aux.differing > 0) {
      room.aux.first = fmt::format("rank {} {}", rank.index(), aux.first);
    }
  }
  room.check_buffer = 0;
  room.landed.pop_front();
  end_part(part);
  finish(room.state.room);
}

void DecodeRole::on_lost(Rank& rank, const std::string& reason) {
  std::vector<Room> lost;
  for (auto& [id, entry] : rooms_) {
    auto& room = entry;  // older compilers let no lambda capture a binding
    RoomPart* part = room.state.part_of(rank);
    const bool landed =
        part != nullptr && std::any_of(room.landed.begin(), room.landed.end(),
                                       [&](std::size_t i) { return &room.state.parts[i] == part; });
    if (part != nullptr && !landed) {
      lose_part(room.state, *part, reason);
      lost.push_back(id);
    }
  }
  for (const Room id : lost) {
    finish(id);
  }
}

void DecodeRole::finish(Room id) {
  const auto found = rooms_.find(id);
  if (found == rooms_.end() || !found->second.state.ended()) {
    return;
  }
  const Expectation& room = found->second;
  if (room.state.failure) {
    sink_.emit(failure_event(id, *room.state.failure));
  } else {
    std::uint64_t bytes = 0;
    std::uint64_t transfer_ns = 0;
    for (const RoomPart& part : room.state.parts) {
      bytes += part.bytes;
      transfer_ns = std::max(transfer_ns, part.transfer_ns);
    }
    nlohmann::json event{{"event", "landed"},
                         {"room", id},
                         {"bytes", bytes},
                         {"transfer_ns", transfer_ns},
                         {"at_ns", room.landed_at_ns},
                         {"payload", room.report.payload},
                         {"verified", room.report.compared + room.aux.compared},
                         {"mismatches", room.report.differing + room.aux.differing}};
    if (!room.report.first.empty()) {
      event["first"] = describe(room.report.first.front());
    }
    if (room.aux.differing > 0) {
      event["aux_first"] = room.aux.first;
    }
    sink_.emit(event);
  }
  turns_.erase(std::remove(turns_.begin(), turns_.end(), id), turns_.end());
  rooms_.erase(found);
}

}  // namespace kvferry
