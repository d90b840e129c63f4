// The engines: they hold pages, use rooms, die and come back, and give pages back the moment they may.
#include <algorithm>
#include <cstring>

#include "tests/sim/world.h"

namespace kvferry::sim {

namespace {
constexpr int kTries = 6;
}  // namespace

void World::new_engine(Engine& engine) {
  engine.alive = true;
  engine.id = 0;
  engine.limbo.clear();
  engine.pool = new_pool(spec_.model, engine.prefill ? spec_.prefill : spec_.decode, engine.rank,
                         spec_.page_size, spec_.pages);
  engine.free.clear();
  for (std::uint32_t page = 0; page < spec_.pages; ++page) {
    engine.free.push_back(page);
  }
  if (!engine.prefill) {
    shadow_.add(engine.pool);
  }
  attach(engine);
}

void World::attach(Engine& engine) {
  if (!engine.alive || engine.id != 0) {
    return;
  }
  Daemon& daemon = daemon_of(engine);
  const EngineId id = next_engine_++;
  bool done = false;
  if (daemon.alive && engine.prefill) {
    done = static_cast<PrefillDaemon&>(daemon).rooms->attach(id, engine.rank, engine.pool).has_value();
  } else if (daemon.alive) {
    auto& decode = static_cast<DecodeDaemon&>(daemon);
    done = decode.rooms->attach(id, engine.rank, engine.pool).has_value();
    for (const auto& [peer, session] : decode.sessions) {
      if (!done) {
        break;
      }
      session->wire->add_pool(engine.pool);
      for (const message::RankUp& up : decode.rooms->announcements()) {
        if (up.rank == engine.rank) {
          say(session, false, up);
        }
      }
    }
  }
  if (done) {
    engine.id = id;
    trace_.add(70, engine.prefill, engine.rank, id);
    return;
  }
  time_.after(5 * kMilli, [this, &engine, life = engine.life] {
    if (engine.life == life) {
      attach(engine);
    }
  });
}

void World::engine_dies(Engine& engine, Nanos down) {
  if (!engine.alive) {
    return;
  }
  trace_.add(80, engine.prefill, engine.rank);
  engine.alive = false;
  ++engine.life;
  for (auto& [room, held] : engine.held) {
    held.use->touched = true;
    (engine.prefill ? held.use->prefill : held.use->decode)[engine.rank] = Fate::kFailed;
  }
  engine.held.clear();
  if (!engine.prefill) {
    shadow_.abandon(*engine.pool);
  }
  Daemon& daemon = daemon_of(engine);
  const EngineId id = std::exchange(engine.id, 0);
  if (daemon.alive && id != 0 && engine.prefill) {
    prefill::Actions actions;
    static_cast<PrefillDaemon&>(daemon).rooms->engine_gone(clock(daemon), id, actions);
    perform(static_cast<PrefillDaemon&>(daemon), actions);
  } else if (daemon.alive && id != 0) {
    decode::Actions actions;
    static_cast<DecodeDaemon&>(daemon).rooms->engine_gone(clock(daemon), id, actions);
    perform(static_cast<DecodeDaemon&>(daemon), actions);
  }
  time_.after(down, [this, &engine] { new_engine(engine); });
}

// The client library sees its daemon die: every room has failed. Pages of a decode pool are free once no
// writer is left; where writers have the memory itself, that is when the last of them has let go of it.
void World::lost_daemon(Engine& engine) {
  if (!engine.alive) {
    return;
  }
  engine.id = 0;
  std::vector<Room> rooms;
  for (auto& [room, held] : engine.held) {
    held.use->touched = true;
    rooms.push_back(room);
  }
  for (const Room room : rooms) {
    Held held = std::move(engine.held.at(room));
    engine.held.erase(room);
    (engine.prefill ? held.use->prefill : held.use->decode)[engine.rank] = Fate::kFailed;
    ++outcome_.failed;
    engine.limbo.insert(room);
    release_when_quiet(engine, std::move(held));
  }
  time_.after(kMilli + random_delay(kMilli), [this, &engine, life = engine.life] {
    if (engine.life == life) {
      attach(engine);
    }
  });
}

void World::release_when_quiet(Engine& engine, Held held) {
  const std::uint32_t daemon = daemon_of(engine).index;
  const bool writers = !engine.prefill && std::any_of(wires_.begin(), wires_.end(), [&](const auto& item) {
    return item.decode == daemon && item.wire->receiver_is_dead() && item.wire->writing();
  });
  if (!writers) {
    engine.limbo.erase(engine.limbo.find(held.use->room));
    give_back(engine, std::move(held));
    return;
  }
  time_.after(kMilli, [this, &engine, life = engine.life, held = std::move(held)]() mutable {
    if (engine.life == life) {
      release_when_quiet(engine, std::move(held));
    }
  });
}

std::optional<std::vector<std::uint32_t>> World::take(Engine& engine, std::uint64_t count) {
  if (engine.free.size() < count || time_.now() < engine.drought_until) {
    return std::nullopt;
  }
  // Most recently freed first: a page that went back too early is used again at once.
  std::vector<std::uint32_t> out(engine.free.end() - static_cast<std::ptrdiff_t>(count), engine.free.end());
  engine.free.resize(engine.free.size() - count);
  return out;
}

void World::skip(Engine& engine, const std::shared_ptr<Use>& use) {
  use->touched = true;
  Fate& fate = (engine.prefill ? use->prefill : use->decode)[engine.rank];
  fate = fate == Fate::kNone ? Fate::kSkipped : fate;
}

void World::expect(Engine& engine, const std::shared_ptr<Use>& use, int tries) {
  if (use->decode.at(engine.rank) != Fate::kNone) {
    return;
  }
  Daemon& daemon = daemon_of(engine);
  const std::uint64_t page = std::uint64_t{spec_.page_size} * spec_.decode.dcp;
  auto pages = engine.alive && engine.id != 0 ? take(engine, (use->tokens - use->prefix + page - 1) / page)
                                              : std::nullopt;
  if (!pages) {
    if (tries >= kTries || !engine.alive) {
      skip(engine, use);
      return;
    }
    time_.after(10 * kMilli, [this, &engine, use, tries] { expect(engine, use, tries + 1); });
    return;
  }
  auto& decode = static_cast<DecodeDaemon&>(daemon);
  engine.held[use->room] = Held{use, *pages, {}};
  decode::Actions actions;
  EngineExpectation want{use->room, "prefill:8998", *pages, use->prefix, use->tokens, aux_slot(*use), -1};
  const auto accepted = decode.rooms->expect(clock(daemon), engine.id, std::move(want), kService, actions);
  trace_.add(90, engine.rank, use->number, accepted.has_value());
  if (!accepted) {
    if (!use->touched && !disturbed_) {
      violation(fmt::format("decode rank {}: room {}: expect refused: {}", engine.rank, use->room,
                            accepted.error().message));
    }
    engine.held.erase(use->room);
    engine.free.insert(engine.free.end(), pages->begin(), pages->end());
    skip(engine, use);
  }
  perform(decode, actions);
}

// All chunks of the use, each in groups of layers when the use says so. An empty one is not divided.
std::vector<World::Piece> World::pieces_of(const Engine& engine, const Use& use) const {
  std::set<std::uint32_t> layers;
  for (const BufferPlace& place : engine.pool->layout().buffers) {
    layers.insert(place.shape.layer);
  }
  std::vector<Piece> out;
  for (std::size_t cut = 0; cut < use.cuts.size(); ++cut) {
    if (use.layer_group == 0 || use.cuts[cut] == use.first_of(cut)) {
      out.push_back({cut, {}});
      continue;
    }
    const std::uint64_t end = *layers.rbegin() + 1;
    for (std::uint64_t layer = *layers.begin(); layer < end; layer += use.layer_group) {
      out.push_back({cut, {layer, std::min(end, layer + use.layer_group)}});
    }
  }
  return out;
}

void World::send_next(Engine& engine, const std::shared_ptr<Use>& use, std::size_t number, int tries) {
  const bool begun = engine.held.contains(use->room) && engine.held.at(use->room).use == use;
  if (use->prefill.at(engine.rank) != Fate::kNone || (number > 0 && !begun)) {
    return;
  }
  const std::vector<Piece> pieces = pieces_of(engine, *use);
  const Piece piece = pieces[number];
  const std::uint64_t first = use->first_of(piece.cut);
  const std::uint64_t end = use->cuts[piece.cut];
  const std::uint64_t page = std::uint64_t{spec_.page_size} * spec_.prefill.dcp;
  const bool goes_on = number > 0 && pieces[number - 1].cut == piece.cut;
  auto pages = !engine.alive || engine.id == 0 ? std::nullopt
               : goes_on ? std::optional(engine.held.at(use->room).chunks.at(first).pages)
                         : take(engine, (end - first + page - 1) / page);
  if (!pages) {
    if ((tries >= kTries || !engine.alive) && !begun) {
      skip(engine, use);
    } else if (tries >= kTries) {
      use->touched = true;
      abort_room(engine, use->room);
    } else {
      time_.after(10 * kMilli,
                  [this, &engine, use, number, tries] { send_next(engine, use, number, tries + 1); });
    }
    return;
  }
  // With a fence the rows are still being computed when the chunk is sent.
  const std::uint64_t fence = rng_.chance(1, 4) ? next_fence_++ : 0;
  if (fence == 0) {
    compute(engine, *use, *pages, piece);
  }
  EngineChunk chunk;
  chunk.room = use->room;
  chunk.pages = *pages;
  chunk.first_token = first;
  chunk.token_count = end - first;
  chunk.layer_begin = static_cast<std::uint32_t>(piece.layers.begin);
  chunk.layer_end = static_cast<std::uint32_t>(piece.layers.end);
  chunk.last = number + 1 == pieces.size();
  chunk.begun = number > 0;
  std::vector<prefill::AuxBytes> aux;
  if (chunk.last && use->aux) {
    std::vector<std::byte> ids(kAuxWidth);
    std::vector<std::byte> id(kAuxWidth);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      ids[i] = aux_content(use->number, i);
    }
    std::memcpy(id.data(), &use->room, sizeof use->room);
    aux = {{"output_ids", std::move(ids)}, {kAuxRoomField, std::move(id)}};
  }
  Held& held = engine.held[use->room];
  held.use = use;
  if (!goes_on) {
    HeldChunk& chunk_held = held.chunks[first];
    chunk_held.pages = *pages;
    for (const Piece& other : pieces) {
      if (other.cut == piece.cut) {
        chunk_held.unread.insert(static_cast<std::uint32_t>(other.layers.end));
      }
    }
  }
  auto& daemon = static_cast<PrefillDaemon&>(daemon_of(engine));
  prefill::Actions actions;
  const auto sent =
      daemon.rooms->send(clock(daemon), engine.id, std::move(chunk), fence, std::move(aux), actions);
  trace_.add(100, engine.rank, use->number, number * 2 + sent.has_value());
  if (!sent) {
    if (!use->touched && !disturbed_) {
      violation(fmt::format("prefill rank {}: room {}: send refused: {}", engine.rank, use->room,
                            sent.error().message));
    }
    if (!goes_on) {  // otherwise the groups before it have the pages until the final event
      held.chunks.erase(first);
      engine.free.insert(engine.free.end(), pages->begin(), pages->end());
    }
    if (!begun) {
      engine.held.erase(use->room);
      skip(engine, use);
    }
  } else if (fence != 0) {
    time_.after(random_delay(4 * kMilli),
                [this, &engine, use, piece, fence, pages = *pages, life = engine.life] {
                  pass_fence(engine, life, use, pages, piece, fence);
                });
  }
  if (sent && number + 1 < pieces.size()) {
    time_.after(random_delay(4 * kMilli),
                [this, &engine, use, number] { send_next(engine, use, number + 1, 0); });
  }
  perform(daemon, actions);
}

void World::compute(Engine& engine, const Use& use, const std::vector<std::uint32_t>& pages,
                    const Piece& piece) {
  const std::uint64_t first = use.first_of(piece.cut);
  const std::uint64_t end = use.cuts[piece.cut];
  for_rows(spec_.model, spec_.prefill, *engine.pool, pages, first, end, [&](const OwnedRow& row) {
    const BufferShape& shape = engine.pool->layout().buffers[row.buffer].shape;
    if (piece.layers.end != 0 && !piece.layers.contains(shape.layer)) {
      return;
    }
    for (std::size_t i = 0; i < row.bytes.size(); ++i) {
      row.bytes[i] = content(use.number, shape.layer, shape.kind, row.head_byte + i, row.token);
    }
  });
}

// The rows of a chunk are there, and its fence says so. After the end of the room they belong to others, and
// a kernel that was under way has been waited for; but the fence's message may still come.
void World::pass_fence(Engine& engine, std::uint64_t life, const std::shared_ptr<Use>& use,
                       const std::vector<std::uint32_t>& pages, const Piece& piece, std::uint64_t fence) {
  if (engine.life != life || engine.id == 0) {
    return;
  }
  const auto at = engine.held.find(use->room);
  if (at != engine.held.end() && at->second.use == use &&
      at->second.chunks.contains(use->first_of(piece.cut))) {
    compute(engine, *use, pages, piece);
  }
  auto& daemon = static_cast<PrefillDaemon&>(daemon_of(engine));
  prefill::Actions actions;
  daemon.rooms->chunk_ready(clock(daemon), engine.id, use->room, fence, actions);
  perform(daemon, actions);
}

void World::abort_room(Engine& engine, Room room) {
  const auto at = engine.held.find(room);
  Daemon& daemon = daemon_of(engine);
  if (at == engine.held.end() || engine.id == 0 || !daemon.alive) {
    return;
  }
  at->second.use->touched = true;
  trace_.add(110, engine.prefill, engine.rank, room);
  if (engine.prefill) {
    prefill::Actions actions;
    (void)static_cast<PrefillDaemon&>(daemon).rooms->abort(clock(daemon), engine.id, {room}, actions);
    perform(static_cast<PrefillDaemon&>(daemon), actions);
  } else {
    decode::Actions actions;  // refused when the room has ended and its event is under way
    (void)static_cast<DecodeDaemon&>(daemon).rooms->abort(clock(daemon), engine.id, {room}, actions);
    perform(static_cast<DecodeDaemon&>(daemon), actions);
  }
}

void World::deliver(Engine& engine, const EngineEvent& event) {
  trace_.add(120 + static_cast<std::uint64_t>(event.type), engine.prefill, engine.rank, event.room);
  const auto at = engine.held.find(event.room);
  switch (event.type) {
    case EngineEventType::kGranted:
      return;
    case EngineEventType::kChunkDone:
      if (at != engine.held.end()) {
        const auto chunk = at->second.chunks.find(event.tokens);
        if (chunk == at->second.chunks.end() || chunk->second.unread.erase(event.layer_end) == 0) {
          violation(fmt::format("prefill rank {}: room {}: a chunk was done twice", engine.rank, event.room));
          return;
        }
        if (!chunk->second.unread.empty()) {
          return;  // other layers of its pages are not read yet
        }
        engine.free.insert(engine.free.end(), chunk->second.pages.begin(), chunk->second.pages.end());
        at->second.chunks.erase(chunk);
      }
      return;
    case EngineEventType::kLanded:
      ++outcome_.landed;
      end(engine, event.room, Fate::kLanded, "");
      return;
    case EngineEventType::kFailed:
      ++outcome_.failed;
      end(engine, event.room, Fate::kFailed, event.reason);
      return;
    case EngineEventType::kAborted:
      ++outcome_.aborted;
      end(engine, event.room, Fate::kAborted, event.reason);
      return;
  }
}

void World::end(Engine& engine, Room room, Fate fate, const std::string& why) {
  const auto at = engine.held.find(room);
  const char* side = engine.prefill ? "prefill" : "decode";
  if (at == engine.held.end()) {
    // A prefill engine that never sent the room may still hear why nobody wants it any more.
    if (!engine.prefill) {
      violation(fmt::format("{} rank {}: a second end of room {}", side, engine.rank, room));
    }
    return;
  }
  Held held = std::move(at->second);
  engine.held.erase(at);
  Use& use = *held.use;
  (engine.prefill ? use.prefill : use.decode)[engine.rank] = fate;
  if (why.starts_with("wrong bytes")) {
    ++outcome_.caught;
    if (!flipped_.contains(room)) {
      violation(fmt::format("{} rank {}: room {}: {}, but no byte of it was changed", side, engine.rank, room,
                            why));
    }
  }
  if (fate != Fate::kLanded && !use.touched && !disturbed_) {
    violation(fmt::format("{} rank {}: room {} ended although nobody disturbed it: {}", side, engine.rank,
                          room, why));
  }
  if (fate == Fate::kLanded) {
    engine.prefill ? check_delivered(engine, use) : check_bytes(engine, held);
  }
  give_back(engine, std::move(held));
}

void World::give_back(Engine& engine, Held held) {
  if (!engine.prefill) {
    shadow_.revoke(*engine.pool, held.pages, aux_slot(*held.use));
  }
  engine.free.insert(engine.free.end(), held.pages.begin(), held.pages.end());
  for (const auto& [first, chunk] : held.chunks) {
    engine.free.insert(engine.free.end(), chunk.pages.begin(), chunk.pages.end());
  }
}

}  // namespace kvferry::sim
