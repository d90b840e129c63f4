// What the engine asks for: attach, send, abort, and its death.

#include <algorithm>

#include "common/pool/hybrid_rows.h"
#include "prefill/rooms.h"

namespace kvferry::prefill {

Rooms::Rooms(RoomsOptions options)
    : options_(std::move(options)), model_(std::make_shared<const ModelGeometry>(options_.model)) {}

Result<void> Rooms::attach(EngineId engine, RankIndex rank, std::shared_ptr<const Pool> pool) {
  const auto [at, fresh] = ranks_.try_emplace(rank, LocalRank{engine, std::move(pool)});
  if (!fresh) {
    return fail(Code::kConflict, "rank {} is attached already; detach the other engine process first", rank);
  }
  engines_[engine] = rank;
  for (auto& [id, peer] : peers_) {  // the new pool may have another shape
    std::erase_if(peer.layouts, [&](const auto& item) { return item.first.first == rank; });
  }
  return {};
}

std::optional<RankIndex> Rooms::rank_of(EngineId engine) const {
  const auto at = engines_.find(engine);
  return at == engines_.end() ? std::nullopt : std::optional(at->second);
}

Result<void> Rooms::check_chunk(const EngineChunk& chunk, const Pool& pool) const {
  const std::uint64_t page = pool.page_size();
  const std::uint64_t virtual_page = page * options_.topology.dcp;
  if (!room_is_legal(chunk.room)) {
    return fail(Code::kInvalid, "room {} is not from 1 to 2^63-1", chunk.room);
  }
  if (chunk.first_token > kRoomMax || chunk.token_count > kRoomMax - chunk.first_token) {
    return fail(Code::kInvalid, "room {}: first_token {} plus token_count {} is beyond 2^63-1", chunk.room,
                chunk.first_token, chunk.token_count);
  }
  if (chunk.first_token % virtual_page != 0) {
    return fail(Code::kInvalid, "room {}: first_token {} is not a multiple of page_size*dcp = {}", chunk.room,
                chunk.first_token, virtual_page);
  }
  if (!chunk.last && chunk.token_count % virtual_page != 0) {
    return fail(Code::kInvalid,
                "room {}: token_count {} is not a multiple of page_size*dcp = {}; only the last chunk may "
                "end inside a page",
                chunk.room, chunk.token_count, virtual_page);
  }
  if (!chunk.last && chunk.token_count == 0) {
    return fail(Code::kInvalid, "room {}: token_count is 0; only the last chunk may be empty", chunk.room);
  }
  const Interval tokens{chunk.first_token, chunk.first_token + chunk.token_count};
  KVF_TRY_VOID(check_page_list(pool, virtual_page, chunk.room, tokens, chunk.pages.size()));
  const std::uint64_t limit = page_count(pool.layout());
  for (const std::uint32_t id : chunk.pages) {
    if (id >= limit) {
      return fail(Code::kInvalid, "room {}: page {} is outside the pool of {} pages", chunk.room, id, limit);
    }
  }
  if (chunk.last) {
    KVF_TRY_VOID(check_hybrid(pool, virtual_page, chunk.room, {}, tokens.end, chunk.hybrid));
  }
  if (chunk.last && chunk.aux_slot >= 0) {
    for (const AuxField& field : pool.layout().aux) {
      if (static_cast<std::uint32_t>(chunk.aux_slot) >= field.slots) {
        return fail(Code::kInvalid, "room {}: aux_slot {} is outside aux field '{}' of {} slots", chunk.room,
                    chunk.aux_slot, field.name, field.slots);
      }
    }
  }
  return {};
}

Result<void> Rooms::check_order(const Entry& entry, const EngineChunk& chunk) const {
  if (entry.failure) {
    return fail(entry.failure->code, "room {} has ended: {}", chunk.room, entry.failure->message);
  }
  if (entry.engine == 0) {
    return {};
  }
  if (entry.last_seen ||
      (chunk.first_token != entry.next_token && chunk.first_token == entry.chunks.front().first)) {
    return fail(Code::kConflict, "room {} is alive already; wait for its final event before using it again",
                chunk.room);
  }
  if (chunk.first_token != entry.next_token) {
    return fail(Code::kInvalid,
                "room {}: first_token is {}, the chunks so far end at {}; chunks follow without gaps",
                chunk.room, chunk.first_token, entry.next_token);
  }
  if (entry.chunks.size() >= options_.chunks_per_room_max) {
    return fail(Code::kExhausted, "room {} has {} chunks, limits.chunks_per_room is {}", chunk.room,
                entry.chunks.size(), options_.chunks_per_room_max);
  }
  return {};
}

Result<void> Rooms::send(Nanos now, EngineId engine, EngineChunk chunk, std::uint64_t fence,
                         std::vector<AuxBytes> aux, Actions& out) {
  const auto rank = rank_of(engine);
  if (!rank) {
    return fail(Code::kInvalid, "this engine has not attached");
  }
  const LocalRank& local = ranks_.at(*rank);
  KVF_TRY_VOID(check_chunk(chunk, *local.pool));
  const RoomKey key{chunk.room, *rank};
  auto at = entries_.find(key);
  if (chunk.begun && (at == entries_.end() || at->second.engine == 0)) {
    const auto tomb = tombstones_.find(key);
    return fail(Code::kAborted, "room {} has ended, its final event is on the way{}{}", chunk.room,
                tomb != tombstones_.end() && tomb->second.error ? ": " : "",
                tomb != tombstones_.end() && tomb->second.error ? tomb->second.error->message : "");
  }
  if (at == entries_.end()) {
    if (const auto tomb = tombstones_.find(key); tomb != tombstones_.end()) {
      if (!tomb->second.engine_heard && tomb->second.error) {
        tomb->second.engine_heard = true;
        return fail(*tomb->second.error);
      }
      tombstones_.erase(tomb);  // a new use of the room
    }
    if (entries_.size() >= options_.rooms_max) {
      return fail(Code::kExhausted, "{} rooms are alive, limits.rooms is {}; try again later",
                  entries_.size(), options_.rooms_max);
    }
    at = entries_.try_emplace(key).first;
    at->second.created = now;
  } else {
    KVF_TRY_VOID(check_order(at->second, chunk));
  }
  Entry& entry = at->second;
  entry.engine = engine;
  entry.pool = local.pool;
  entry.progress = now;
  entry.next_token = chunk.first_token + chunk.token_count;
  entry.page_count += chunk.pages.size();
  if (chunk.last) {
    entry.last_seen = true;
    entry.aux = std::move(aux);
  }
  entry.chunks.push_back(Chunk{.pages = std::move(chunk.pages),
                               .first = chunk.first_token,
                               .count = chunk.token_count,
                               .last = chunk.last,
                               .fence = fence,
                               .hybrid = std::move(chunk.hybrid)});
  pump(now, key, entry, out);
  settle(now, key, out);
  return {};
}

void Rooms::chunk_ready(Nanos now, EngineId engine, Room room, std::uint64_t fence, Actions& out) {
  const auto rank = rank_of(engine);
  const auto at = rank ? entries_.find({room, *rank}) : entries_.end();
  if (at == entries_.end() || at->second.engine != engine) {
    return;  // the room ended while its fence was open
  }
  auto& chunks = at->second.chunks;
  const auto chunk =
      std::find_if(chunks.begin(), chunks.end(), [fence](const Chunk& one) { return one.fence == fence; });
  if (chunk == chunks.end() || fence == 0) {
    return;  // of an earlier use of the room
  }
  chunk->fence = 0;
  at->second.progress = now;
  pump(now, at->first, at->second, out);
  settle(now, RoomKey(at->first), out);
}

Result<void> Rooms::abort(Nanos now, EngineId engine, const EngineAbort& abort, Actions& out) {
  const Room room = abort.room;
  const auto rank = rank_of(engine);
  if (!rank) {
    return fail(Code::kInvalid, "this engine has not attached");
  }
  if (!room_is_legal(room)) {
    return fail(Code::kInvalid, "room {} is not from 1 to 2^63-1", room);
  }
  const RoomKey key{room, *rank};
  Error error{Code::kAborted, fmt::format("aborted by the prefill engine of rank {}{}{}", *rank,
                                          abort.reason.empty() ? "" : ": ", abort.reason)};
  const auto at = entries_.find(key);
  if (abort.begun && (at == entries_.end() || at->second.engine == 0)) {
    return {};  // it crosses the final event of that use; what is here now belongs to the next one
  }
  if (at == entries_.end()) {
    bury(key,
         Tombstone{
             .error = std::move(error),
             .engine_heard = true,
             .expires =
                 now + options_.bootstrap.count()});  // a grant that is still on its way must find the reason
    return {};
  }
  begin_end(now, key, at->second, std::move(error), out);
  settle(now, key, out);
  return {};
}

void Rooms::engine_gone(Nanos now, EngineId engine, Actions& out) {
  const auto rank = rank_of(engine);
  if (!rank) {
    return;
  }
  std::vector<RoomKey> mine;
  for (auto& [key, entry] : entries_) {
    if (key.rank == *rank && entry.engine == engine) {
      entry.engine = 0;  // nobody is left to be told
      begin_end(now, key, entry,
                Error{Code::kEngineLost, fmt::format("the prefill engine of rank {} went away", *rank)}, out);
      mine.push_back(key);
    }
  }
  ranks_.erase(*rank);
  engines_.erase(engine);
  for (const RoomKey& key : mine) {
    settle(now, key, out);
  }
}

}  // namespace kvferry::prefill
