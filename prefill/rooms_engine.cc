// What the engine asks for: attach, send, abort, and its death.

#include <algorithm>

#include "prefill/rooms.h"

namespace kvferry::prefill {

Rooms::Rooms(RoomsOptions options)
    : options_(std::move(options)), model_(std::make_shared<const ModelGeometry>(options_.model)) {}

Result<void> Rooms::attach(EngineId engine, RankIndex rank, std::shared_ptr<const Pool> pool) {
  std::vector<std::uint32_t> layers;
  for (const BufferPlace& place : pool->layout().buffers) {
    layers.push_back(place.shape.layer);
  }
  std::sort(layers.begin(), layers.end());
  layers.erase(std::unique(layers.begin(), layers.end()), layers.end());
  const auto [at, fresh] = ranks_.try_emplace(rank, LocalRank{engine, std::move(pool), std::move(layers)});
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

Result<void> Rooms::send(Nanos now, EngineId engine, EngineChunk chunk, std::uint64_t fence,
                         std::vector<AuxBytes> aux, Actions& out) {
  const auto rank = rank_of(engine);
  if (!rank) {
    return fail(Code::kInvalid, "this engine has not attached");
  }
  const LocalRank& local = ranks_.at(*rank);
  KVF_TRY_VOID(check_chunk(chunk, local));
  const RoomKey key{chunk.room, *rank};
  auto at = entries_.find(key);
  if (chunk.begun && (at == entries_.end() || at->second.engine == 0)) {
    const auto tomb = tombstones_.find(key);
    return fail(Code::kAborted, "room {} has ended, its final event is on the way{}{}", chunk.room,
                tomb != tombstones_.end() && tomb->second.error ? ": " : "",
                tomb != tombstones_.end() && tomb->second.error ? tomb->second.error->message : "");
  }
  if (at == entries_.end()) {
    const auto tomb = tombstones_.find(key);
    if (tomb != tombstones_.end() && !tomb->second.engine_heard && tomb->second.error) {
      tomb->second.engine_heard = true;
      return fail(*tomb->second.error);
    }
    KVF_TRY_VOID(check_first_layers(chunk, local));
    if (tomb != tombstones_.end()) {
      tombstones_.erase(tomb);  // a new use of the room
    }
    if (entries_.size() >= options_.rooms_max) {
      return fail(Code::kExhausted, "{} rooms are alive, limits.rooms is {}; try again later",
                  entries_.size(), options_.rooms_max);
    }
    at = entries_.try_emplace(key).first;
    at->second.created = now;
  } else {
    KVF_TRY_VOID(check_order(at->second, chunk, local));
  }
  Entry& entry = at->second;
  entry.engine = engine;
  entry.pool = local.pool;
  entry.progress = now;
  // The groups of the same tokens have one page list, and their pages count once.
  auto pages = entry.next_layer != 0 ? entry.chunks.back().pages : nullptr;
  if (pages == nullptr) {
    entry.page_count += chunk.pages.size();
    pages = std::make_shared<const std::vector<std::uint32_t>>(std::move(chunk.pages));
  }
  const bool completes = local.completes(chunk);
  entry.next_token = chunk.first_token + (completes ? chunk.token_count : 0);
  entry.next_layer = completes ? 0 : chunk.layer_end;
  if (chunk.last) {
    entry.last_seen = true;
    entry.aux = std::move(aux);
  }
  entry.chunks.push_back(Chunk{.pages = std::move(pages),
                               .first = chunk.first_token,
                               .count = chunk.token_count,
                               .layer_begin = chunk.layer_begin,
                               .layer_end = chunk.layer_end,
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
