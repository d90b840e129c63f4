// What the engine asks for: attach, expect, abort, and its death.

#include <algorithm>

#include "common/pool/hybrid_rows.h"
#include "decode/rooms.h"

namespace kvferry::decode {
namespace {

constexpr std::uint64_t kTokensMax = std::uint64_t{1} << 40;

std::vector<std::uint32_t> slots_of(const HybridRows& rows) {
  return rows.state_slot ? std::vector{*rows.state_slot} : std::vector<std::uint32_t>{};
}

/// Each page inside the pool, named once, and not another room's.
Result<void> check_free(Room room, std::string_view what, std::vector<std::uint32_t> pages,
                        const std::vector<Room>& owner) {
  for (const std::uint32_t page : pages) {
    if (page >= owner.size()) {
      return fail(Code::kInvalid, "room {}: {} {} is outside the pool of {}", room, what, page, owner.size());
    }
    if (owner[page] != 0) {
      return fail(Code::kConflict, "room {}: {} {} belongs to room {} until that room's final event", room,
                  what, page, owner[page]);
    }
  }
  std::sort(pages.begin(), pages.end());
  if (const auto twice = std::adjacent_find(pages.begin(), pages.end()); twice != pages.end()) {
    return fail(Code::kInvalid, "room {}: {} {} appears twice", room, what, *twice);
  }
  return {};
}

}  // namespace

Rooms::Rooms(RoomsOptions options)
    : options_(std::move(options)),
      model_(std::make_shared<const ModelGeometry>(options_.model)),
      next_generation_(options_.first_generation) {}

Result<void> Rooms::attach(EngineId engine, RankIndex rank, std::shared_ptr<const Pool> pool) {
  if (const auto at = ranks_.find(rank); at != ranks_.end()) {
    if (at->second.engine == 0) {
      return fail(Code::kUnavailable,
                  "rank {}: the pool of the engine before still drains; try again shortly", rank);
    }
    return fail(Code::kConflict, "rank {} is attached already; detach the other engine process first", rank);
  }
  LocalRank& local = ranks_[rank];
  local.engine = engine;
  const auto owners = [&pool](RowSpace space) {
    return std::vector<Room>(static_cast<std::size_t>(page_count(pool->layout(), space)), 0);
  };
  local.page_owner = owners(RowSpace::kTokens);
  local.window_owner = owners(RowSpace::kWindow);
  local.state_owner = owners(RowSpace::kState);
  local.pool = std::move(pool);
  engines_[engine] = rank;
  return {};
}

std::optional<RankIndex> Rooms::rank_of(EngineId engine) const {
  const auto at = engines_.find(engine);
  return at == engines_.end() ? std::nullopt : std::optional(at->second);
}

bool Rooms::rank_attached(RankIndex rank) const {
  const auto at = ranks_.find(rank);
  return at != ranks_.end() && at->second.engine != 0;
}

std::vector<message::RankUp> Rooms::announcements() const {
  std::vector<message::RankUp> out;
  for (const auto& [rank, local] : ranks_) {
    message::RankUp up{rank, local.pool->page_size(), shapes(local.pool->layout()), {}};
    for (const AuxField& field : local.pool->layout().aux) {
      up.aux.push_back({field.name, field.width, field.slots});
    }
    out.push_back(std::move(up));
  }
  return out;
}

Result<void> Rooms::check(const EngineExpectation& want, const LocalRank& local) const {
  const std::uint64_t virtual_page = std::uint64_t{local.pool->page_size()} * options_.topology.dcp;
  if (!room_is_legal(want.room)) {
    return fail(Code::kInvalid, "room {} is not from 1 to 2^63-1", want.room);
  }
  if (want.token_count > kTokensMax || want.prefix > want.token_count) {
    return fail(Code::kInvalid,
                "room {}: prefix {} and token_count {} must satisfy prefix <= token_count <= 2^40", want.room,
                want.prefix, want.token_count);
  }
  if (want.prefix % virtual_page != 0 && want.prefix != want.token_count) {
    return fail(
        Code::kInvalid,
        "room {}: prefix {} is not a multiple of page_size*dcp = {}; round it down so that decode_prefix_len "
        "aligns to the virtual page",
        want.room, want.prefix, virtual_page);
  }
  KVF_TRY_VOID(check_page_list(*local.pool, virtual_page, want.room, {want.prefix, want.token_count},
                               want.pages.size()));
  if (want.pages.size() > options_.pages_per_room_max) {
    return fail(Code::kExhausted, "room {}: {} pages, limits.pages_per_room is {}", want.room,
                want.pages.size(), options_.pages_per_room_max);
  }
  KVF_TRY_VOID(check_free(want.room, "page", want.pages, local.page_owner));
  const Interval window = window_of(options_.model.sliding_window, {want.prefix, want.token_count});
  KVF_TRY_VOID(check_hybrid(*local.pool, virtual_page, want.room, window, want.token_count, want.hybrid));
  KVF_TRY_VOID(check_free(want.room, "window page", want.hybrid.window_pages, local.window_owner));
  KVF_TRY_VOID(check_free(want.room, "state slot", slots_of(want.hybrid), local.state_owner));
  for (const AuxField& field : local.pool->layout().aux) {
    if (want.aux_slot >= 0 && static_cast<std::uint32_t>(want.aux_slot) >= field.slots) {
      return fail(Code::kInvalid, "room {}: aux_slot {} is outside aux field '{}' of {} slots", want.room,
                  want.aux_slot, field.name, field.slots);
    }
  }
  return {};
}

void Rooms::own_pages(LocalRank& local, const std::vector<std::uint32_t>& pages, const HybridRows& hybrid,
                      Room owner) {
  for (const std::uint32_t page : pages) {
    local.page_owner[page] = owner;
  }
  for (const std::uint32_t page : hybrid.window_pages) {
    local.window_owner[page] = owner;
  }
  if (hybrid.state_slot) {
    local.state_owner[*hybrid.state_slot] = owner;
  }
}

Result<void> Rooms::expect(Nanos now, EngineId engine, EngineExpectation want, ServiceId service,
                           Actions& out) {
  const auto rank = rank_of(engine);
  if (!rank) {
    return fail(Code::kInvalid, "this engine has not attached");
  }
  LocalRank& local = ranks_.at(*rank);
  KVF_TRY_VOID(check(want, local));
  const RoomKey key{want.room, *rank};
  if (const auto at = entries_.find(key); at != entries_.end()) {
    if (!at->second.told) {
      return fail(Code::kConflict, "room {} is alive already on decode rank {}; wait for its final event",
                  want.room, *rank);
    }
    // Only the protocol's tail is left and it owns no pages: the new use of the room takes its place.
    begin_end(now, at->second, Error{Code::kAborted, "room is used again"}, out);
    entries_.erase(key);
  }
  if (entries_.size() >= options_.rooms_max) {
    return fail(Code::kExhausted, "{} rooms are alive, limits.rooms is {}; try again later", entries_.size(),
                options_.rooms_max);
  }
  own_pages(local, want.pages, want.hybrid, want.room);
  Entry& entry = entries_[key];
  entry.engine = engine;
  entry.service = service;
  entry.key = GrantKey{want.room, next_generation_++, *rank};
  entry.pages = std::make_shared<const std::vector<std::uint32_t>>(std::move(want.pages));
  entry.prefix = want.prefix;
  entry.tokens = want.token_count;
  entry.aux_slot = want.aux_slot;
  entry.hybrid = std::move(want.hybrid);
  entry.dp = want.prefill_dp_rank;
  entry.created = now;
  if (entry.prefix == entry.tokens && entry.aux_slot < 0 && !entry.hybrid.state_slot) {
    tell(key, entry, EngineEvent{.type = EngineEventType::kLanded, .room = want.room, .tokens = entry.tokens},
         out);
    entry.told = true;
  }
  try_grant(now, key, entry, out);
  settle(now, key, out);
  return {};
}

Result<void> Rooms::abort(Nanos now, EngineId engine, const EngineAbort& abort, Actions& out) {
  const Room room = abort.room;
  const auto rank = rank_of(engine);
  if (!rank) {
    return fail(Code::kInvalid, "this engine has not attached");
  }
  const RoomKey key{room, *rank};
  const auto at = entries_.find(key);
  if (at == entries_.end() || at->second.told) {
    return fail(Code::kNotFound, "room {} is not alive on decode rank {}", room, *rank);
  }
  begin_end(now, at->second,
            Error{Code::kAborted, fmt::format("aborted by the decode engine of rank {}{}{}", *rank,
                                              abort.reason.empty() ? "" : ": ", abort.reason)},
            out);
  settle(now, key, out);
  return {};
}

void Rooms::engine_gone(Nanos now, EngineId engine, Actions& out) {
  const auto rank = rank_of(engine);
  if (!rank) {
    return;
  }
  ranks_.at(*rank).engine = 0;
  engines_.erase(engine);
  std::vector<RoomKey> mine;
  for (auto& [key, entry] : entries_) {
    if (key.rank == *rank) {
      entry.engine = 0;
      begin_end(now, entry,
                Error{Code::kEngineLost, fmt::format("the decode engine of rank {} went away", *rank)}, out);
      mine.push_back(key);
    }
  }
  for (const RoomKey& key : mine) {
    settle(now, key, out);
  }
  release_if_idle(*rank, out);
}

}  // namespace kvferry::decode
