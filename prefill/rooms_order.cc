// What an engine may send next: tokens without gaps, and their layers all at once or in ascending groups.

#include <algorithm>

#include "common/pool/hybrid_rows.h"
#include "prefill/rooms.h"

namespace kvferry::prefill {

Result<void> Rooms::check_chunk(const EngineChunk& chunk, const LocalRank& local) const {
  const Pool& pool = *local.pool;
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
  KVF_TRY_VOID(check_layers(chunk, local));
  // The call that completes the tokens says whether they are the last.
  if (!chunk.last && local.completes(chunk) && chunk.token_count % virtual_page != 0) {
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

Result<void> Rooms::check_layers(const EngineChunk& chunk, const LocalRank& local) {
  if (chunk.all_layers()) {
    return {};
  }
  if (chunk.layer_begin >= chunk.layer_end) {
    return fail(Code::kInvalid,
                "room {}: layer_begin {} is not below layer_end {}; name the layers of one group, or 0 and 0 "
                "for all",
                chunk.room, chunk.layer_begin, chunk.layer_end);
  }
  if (chunk.layer_end > local.layers_end()) {
    return fail(Code::kInvalid,
                "room {}: layer_end {} is beyond this rank's layers {} to {}; end the last group at {}",
                chunk.room, chunk.layer_end, local.layers.front(), local.layers.back(), local.layers_end());
  }
  const auto first = std::lower_bound(local.layers.begin(), local.layers.end(), chunk.layer_begin);
  if (*first >= chunk.layer_end) {
    return fail(
        Code::kInvalid,
        "room {}: layers {} to {} hold none of this rank, whose next one is {}; end the group behind it",
        chunk.room, chunk.layer_begin, chunk.layer_end - 1, *first);
  }
  if (chunk.last && !local.completes(chunk)) {
    return fail(
        Code::kInvalid,
        "room {}: last is set on layers up to {}, but this rank's end at {}; set it on the group that "
        "ends there",
        chunk.room, chunk.layer_end, local.layers_end());
  }
  return {};
}

/// Of tokens of which nothing was sent before.
Result<void> Rooms::check_first_layers(const EngineChunk& chunk, const LocalRank& local) {
  if (!chunk.all_layers() && chunk.layer_begin > local.layers.front()) {
    return fail(Code::kInvalid,
                "room {}: layer_begin is {}, but nothing of tokens {} to {} was sent before; begin at this "
                "rank's first layer, {}",
                chunk.room, chunk.layer_begin, chunk.first_token, chunk.first_token + chunk.token_count,
                local.layers.front());
  }
  return {};
}

/// Of tokens of which some layers were sent.
Result<void> Rooms::check_next_layers(const Entry& entry, const EngineChunk& chunk) {
  const Chunk& before = entry.chunks.back();
  const auto refuse = [&](std::string what) {
    return fail(
        Code::kInvalid, "room {}: {}; tokens {} to {} were sent up to layer {}, go on with layer_begin {}",
        chunk.room, what, before.first, before.first + before.count, entry.next_layer, entry.next_layer);
  };
  if (chunk.first_token != before.first) {
    return refuse(fmt::format("first_token is {}, but layers of tokens from {} on are missing",
                              chunk.first_token, before.first));
  }
  if (chunk.token_count != before.count) {
    return refuse(fmt::format("token_count is {}, but was {}", chunk.token_count, before.count));
  }
  if (chunk.all_layers()) {
    return refuse("layer_begin and layer_end are 0 (all layers), but some were sent already");
  }
  if (chunk.layer_begin != entry.next_layer) {
    return refuse(fmt::format("layer_begin is {}, which would {}", chunk.layer_begin,
                              chunk.layer_begin < entry.next_layer ? "repeat layers" : "leave a gap"));
  }
  const auto [mine, its] = std::mismatch(chunk.pages.begin(), chunk.pages.end(), before.pages->begin());
  if (mine != chunk.pages.end()) {  // as many as before, since the tokens are the same
    return refuse(fmt::format("pages[{}] is {}, but was {}", mine - chunk.pages.begin(), *mine, *its));
  }
  return {};
}

Result<void> Rooms::check_order(const Entry& entry, const EngineChunk& chunk, const LocalRank& local) const {
  if (entry.failure) {
    return fail(entry.failure->code, "room {} has ended: {}", chunk.room, entry.failure->message);
  }
  if (entry.engine == 0) {
    return check_first_layers(chunk, local);
  }
  if (entry.next_layer != 0) {
    KVF_TRY_VOID(check_next_layers(entry, chunk));
  } else if (entry.last_seen ||
             (chunk.first_token != entry.next_token && chunk.first_token == entry.chunks.front().first)) {
    return fail(Code::kConflict, "room {} is alive already; wait for its final event before using it again",
                chunk.room);
  } else if (chunk.first_token != entry.next_token) {
    return fail(Code::kInvalid,
                "room {}: first_token is {}, the chunks so far end at {}; chunks follow without gaps",
                chunk.room, chunk.first_token, entry.next_token);
  } else {
    KVF_TRY_VOID(check_first_layers(chunk, local));
  }
  if (entry.chunks.size() >= options_.chunks_per_room_max) {
    return fail(Code::kExhausted,
                "room {} has {} chunks (each group of layers is one), limits.chunks_per_room is {}",
                chunk.room, entry.chunks.size(), options_.chunks_per_room_max);
  }
  return {};
}

}  // namespace kvferry::prefill
