// The engines of a RoomWorld: what they ask for, and what they do with events.
#include <algorithm>
#include <cstring>

#include "common/base/check.h"
#include "common/base/hash.h"
#include "tests/support/room_world.h"

namespace kvferry::test {
namespace {

/// The first token that the last stage of prefill gives to this use of a room.
std::uint64_t first_token_of(std::uint64_t use) {
  return use * 1'000 + 4'242;
}

std::vector<std::byte> cell(std::uint64_t value) {
  std::vector<std::byte> out(64);
  std::memcpy(out.data(), &value, sizeof value);
  return out;
}

std::string event_text(const EngineEvent& event) {
  switch (event.type) {
    case EngineEventType::kLanded:
      return fmt::format("landed {}", event.room);
    case EngineEventType::kFailed:
      return fmt::format("failed {} {}", event.room, to_string(event.code));
    case EngineEventType::kAborted:
      return fmt::format("aborted {}", event.room);
    case EngineEventType::kGranted:
    case EngineEventType::kChunkDone:
      return {};
  }
  return {};
}

}  // namespace

// The pages of that many tokens; a rank without rows for tokens has none.
std::vector<std::uint32_t> RoomWorld::take(Engine& engine, std::uint64_t tokens) {
  const std::uint64_t page = std::uint64_t{spec_.page_size} * engine.rank.topology.dcp;
  return take_pages(engine, has_tokens(engine.rank) ? (tokens + page - 1) / page : 0, false);
}

std::vector<std::uint32_t> RoomWorld::take_pages(Engine& engine, std::uint64_t count, bool window) {
  std::vector<std::uint32_t> out;
  while (out.size() < count && !engine.free_pages.empty()) {
    // Most recently freed first: a page that went back too early is used again at once.
    out.push_back(engine.free_pages.back());
    window ? engine.watch.remove_window_page(out.back()) : engine.watch.remove_page(out.back());
    engine.free_pages.pop_back();
  }
  KVF_CHECK(out.size() == count);
  return out;
}

// The pages of the request's sliding window, for a rank that has any.
void RoomWorld::take_window(Engine& engine, RoomRows& rows, const Interval& request) {
  if (!has_window(engine.rank)) {
    return;
  }
  const std::uint64_t page = std::uint64_t{spec_.page_size} * engine.rank.topology.dcp;
  rows.window = window_of(spec_.model.sliding_window, request);
  rows.window_first = rows.window.begin / page * page;
  rows.window_pages = take_pages(engine, (rows.window.end - rows.window_first + page - 1) / page, true);
}

Result<void> RoomWorld::expect(RankIndex rank, Room room, std::uint64_t tokens, std::uint64_t prefix,
                               bool aux) {
  Engine& engine = decode_engines_.at(rank);
  Use use{{use_of_room_[room], take(engine, tokens - prefix), prefix, std::nullopt},
          {prefix, tokens},
          aux ? static_cast<int>(room % kAuxSlots) : -1};
  if (has_state(engine.rank)) {
    use.rows.state_slot = static_cast<std::uint32_t>(room % spec_.pages);
    engine.watch.remove_state(*use.rows.state_slot);
  }
  take_window(engine, use.rows, {prefix, tokens});
  engine.watch.remove_aux(use.aux_slot);
  EngineExpectation want{room, "prefill:8998", use.rows.pages, prefix, tokens, use.aux_slot, -1};
  want.hybrid = {use.rows.window_pages, use.rows.window_first, use.rows.state_slot};
  std::vector<std::uint32_t> pages = use.rows.pages;
  pages.insert(pages.end(), use.rows.window_pages.begin(), use.rows.window_pages.end());
  decode::Actions actions;
  auto accepted = decode.expect(now_, engine.id, std::move(want), kService, actions);
  if (accepted) {
    engine.held[room] = std::move(pages);
    engine.uses[room] = std::move(use);
  } else {
    engine.free_pages.insert(engine.free_pages.end(), pages.begin(), pages.end());
  }
  perform(actions);
  return accepted;
}

void RoomWorld::expect_all(Room room, std::uint64_t tokens, std::uint64_t prefix, bool aux) {
  for (auto& [rank, engine] : decode_engines_) {
    KVF_CHECK(expect(rank, room, tokens, prefix, aux).has_value());
  }
}

Result<void> RoomWorld::send(RankIndex rank, Room room, std::uint64_t first, std::uint64_t count, bool last,
                             bool aux) {
  return send_layers(rank, room, first, count, {}, last, aux);
}

Result<void> RoomWorld::send_layers(RankIndex rank, Room room, std::uint64_t first, std::uint64_t count,
                                    const Interval& layers, bool last, bool aux) {
  Engine& engine = prefill_engines_.at(rank);
  const auto open = engine.open.find(room);
  const bool goes_on = open != engine.open.end() && open->second.first == first;
  RoomRows rows{use_of_room_[room], goes_on ? open->second.pages : take(engine, count), first, std::nullopt};
  std::vector<std::uint32_t> taken = goes_on ? std::vector<std::uint32_t>{} : rows.pages;
  if (last && has_state(engine.rank)) {
    rows.state_slot = static_cast<std::uint32_t>((room + 1) % spec_.pages);
  }
  if (last) {
    take_window(engine, rows, {0, first + count});
    taken.insert(taken.end(), rows.window_pages.begin(), rows.window_pages.end());
  }
  fill_rows(engine.rank, rows, has_tokens(engine.rank) ? Interval{first, first + count} : Interval{},
            layers.end == 0 ? kAllLayers : layers);
  EngineChunk chunk;
  chunk.room = room;
  chunk.pages = rows.pages;
  chunk.layer_begin = static_cast<std::uint32_t>(layers.begin);
  chunk.layer_end = static_cast<std::uint32_t>(layers.end);
  chunk.first_token = first;
  chunk.token_count = count;
  chunk.last = last;
  chunk.begun = engine.held.contains(room);
  chunk.hybrid = {rows.window_pages, rows.window_first, rows.state_slot};
  std::vector<prefill::AuxBytes> row;
  if (last && aux) {
    // The stages of decode get their rows from different stages of prefill, which then all have the token.
    const bool last_stage = spec_.decode.pp > 1 || spec_.prefill.coord(rank).pp + 1 == spec_.prefill.pp;
    row = {{"output_ids", cell(last_stage ? first_token_of(rows.use) : 1111)}, {kAuxRoomField, cell(room)}};
  }
  prefill::Actions actions;
  auto sent = prefill.send(now_, engine.id, std::move(chunk), 0, std::move(row), actions);
  if (sent) {
    auto& held = engine.held[room];  // present, though empty, for a rank without token pages
    held.insert(held.end(), taken.begin(), taken.end());
    engine.open.erase(room);
    if (layers.end != 0 && layers.end < layers_of(engine.rank).end) {
      engine.open[room] = {first, rows.pages};
    }
  } else {
    engine.free_pages.insert(engine.free_pages.end(), taken.begin(), taken.end());
  }
  perform(actions);
  return sent;
}

void RoomWorld::send_all(Room room, std::uint64_t tokens, std::uint64_t chunk, std::uint64_t first,
                         std::uint32_t group) {
  for (auto& [rank, engine] : prefill_engines_) {
    std::uint64_t at = first;
    do {
      const std::uint64_t count = std::min(chunk, tokens - at);
      const Interval all = layers_of(engine.rank);
      std::uint64_t layer = all.begin;
      for (; group != 0 && count > 0 && layer + group < all.end; layer += group) {
        KVF_CHECK(send_layers(rank, room, at, count, {layer, layer + group}, false).has_value());
      }
      const Interval rest = layer == all.begin ? Interval{} : Interval{layer, all.end};
      KVF_CHECK(send_layers(rank, room, at, count, rest, at + count == tokens).has_value());
      at += count;
    } while (at < tokens);
  }
}

Result<void> RoomWorld::abort_decode(RankIndex rank, Room room) {
  decode::Actions actions;
  auto result = decode.abort(now_, decode_engines_.at(rank).id, {room, "test"}, actions);
  perform(actions);
  return result;
}

Result<void> RoomWorld::abort_prefill(RankIndex rank, Room room) {
  prefill::Actions actions;
  auto result = prefill.abort(now_, prefill_engines_.at(rank).id,
                              {room, "test", prefill_engines_.at(rank).held.contains(room)}, actions);
  perform(actions);
  return result;
}

void RoomWorld::decode_engine_dies(RankIndex rank) {
  decode::Actions actions;
  decode.engine_gone(now_, decode_engines_.at(rank).id, actions);
  perform(actions);
}

void RoomWorld::prefill_engine_dies(RankIndex rank) {
  prefill::Actions actions;
  prefill.engine_gone(now_, prefill_engines_.at(rank).id, actions);
  perform(actions);
}

void RoomWorld::deliver_event(bool prefill_side, EngineId id, const EngineEvent& event) {
  for (auto& [rank, engine] : prefill_side ? prefill_engines_ : decode_engines_) {
    if (engine.id != id) {
      continue;
    }
    const std::string text = event_text(event);
    if (event.type == EngineEventType::kChunkDone) {
      engine.done.push_back(
          fmt::format("room {} tokens {} layers {}", event.room, event.tokens, event.layer_end));
    }
    if (text.empty()) {
      return;
    }
    engine.events.push_back(text);
    if (event.type != EngineEventType::kLanded) {
      last_reason = event.reason;
    }
    if (!engine.held.contains(event.room) && prefill_side) {
      violations.push_back(
          fmt::format("prefill rank {}: final event '{}' for a room it does not hold", rank, text));
    }
    if (!prefill_side && event.type == EngineEventType::kLanded) {
      verify(engine, event.room);
    }
    give_back(engine, event.room, !prefill_side);
  }
}

void RoomWorld::give_back(Engine& engine, Room room, bool watch) {
  const auto& pages = engine.held[room];
  engine.free_pages.insert(engine.free_pages.end(), pages.begin(), pages.end());
  if (const auto use = engine.uses.find(room); watch && use != engine.uses.end()) {
    engine.watch.add(engine.rank, use->second.rows, use->second.aux_slot);
  }
  engine.held.erase(room);
  engine.uses.erase(room);
  engine.open.erase(room);
}

void RoomWorld::verify(Engine& engine, Room room) {
  const auto at = engine.uses.find(room);
  if (at == engine.uses.end()) {
    return;
  }
  const Use& use = at->second;
  const std::string wrong =
      wrong_rows(engine.rank, use.rows, has_tokens(engine.rank) ? use.tokens : Interval{});
  std::uint64_t hash = 0;
  for (std::uint32_t buffer = 0; buffer < engine.rank.pool->buffer_count(); ++buffer) {
    hash = hash * 31 + hash_bytes(engine.rank.pool->buffer(buffer));
  }
  engine.landed.push_back(hash);
  if (!wrong.empty()) {
    violations.push_back(fmt::format("room {} landed with wrong bytes: decode {}", room, wrong));
  }
  if (use.aux_slot >= 0) {
    std::uint64_t token = 0;
    std::memcpy(&token, engine.rank.pool->aux_row(0, static_cast<std::uint32_t>(use.aux_slot)).data(),
                sizeof token);
    if (token != first_token_of(use.rows.use)) {
      violations.push_back(fmt::format("room {} landed with first token {}, its own is {}", room, token,
                                       first_token_of(use.rows.use)));
    }
  }
}

}  // namespace kvferry::test
