#include "tests/support/room_world.h"

#include <algorithm>
#include <cstring>

#include "common/base/check.h"

namespace kvferry::test {
namespace {

constexpr PeerId kDecodePeer = 3;   // the prefill daemon's number for the decode daemon
constexpr PeerId kPrefillPeer = 5;  // the decode daemon's number for the prefill daemon
constexpr decode::ServiceId kService = 1;
constexpr std::byte kGuard{0xA5};

prefill::RoomsOptions prefill_options(const WorldSpec& spec) {
  prefill::RoomsOptions out;
  out.model = spec.model;
  out.topology = spec.prefill;
  out.jobs_per_peer_max = spec.jobs_per_peer_max;
  out.chunks_per_room_max = spec.chunks_per_room_max;
  out.rooms_max = spec.rooms_max;
  return out;
}

decode::RoomsOptions decode_options(const WorldSpec& spec) {
  decode::RoomsOptions out;
  out.model = spec.model;
  out.topology = spec.decode;
  out.rooms_max = spec.rooms_max;
  out.verify = spec.verify;
  return out;
}

std::byte content(std::uint64_t use, const BufferShape& shape, std::uint64_t head_byte, std::uint64_t token) {
  const std::uint64_t mixed =
      (use * 1'000'003 + shape.layer * 7919 + static_cast<std::uint64_t>(shape.kind) * 104'729 +
       token * 611'953 + head_byte) *
      0x9E3779B97F4A7C15ull;
  return static_cast<std::byte>(mixed >> 56);
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

// Passes everything on, but closing stops nothing, as with a peer that writes by itself.
class RoomWorld::OneSided final : public ReceiveFabric {
 public:
  OneSided(InprocNetwork& network, FabricSink sink) : sink_(sink), inner_(network, std::move(sink)) {}
  FabricKind kind() const override { return inner_.kind(); }
  bool receiver_places_bytes() const override { return false; }
  void add_pool(std::shared_ptr<const Pool> pool) override { inner_.add_pool(std::move(pool)); }
  void remove_pool(RankIndex rank) override { inner_.remove_pool(rank); }
  Result<FabricOffer> offer(PeerId peer) override { return inner_.offer(peer); }
  void open(Grant grant) override { inner_.open(std::move(grant)); }
  void close(const GrantKey& key) override { sink_(fabric_event::GrantClosed{key}); }
  void fence(PeerId peer) override { inner_.fence(peer); }

 private:
  FabricSink sink_;
  InprocReceiveFabric inner_;
};

RoomWorld::RoomWorld(WorldSpec spec)
    : prefill(prefill_options(spec)), decode(decode_options(spec)), spec_(std::move(spec)) {
  SendQueueLimits limits;
  limits.chunks_max = spec_.chunks_max;
  send_fabric_ = std::make_unique<InprocSendFabric>(
      network_, limits, [this](FabricEvent&& event) { prefill_fabric_events_.push_back(std::move(event)); });
  const FabricSink sink = [this](FabricEvent&& event) { decode_fabric_events_.push_back(std::move(event)); };
  if (spec_.one_sided) {
    receive_fabric_ = std::make_unique<OneSided>(network_, sink);
  } else {
    receive_fabric_ = std::make_unique<InprocReceiveFabric>(network_, sink);
  }
  for (RankIndex rank = 0; rank < spec_.prefill.rank_count(); ++rank) {
    attach(true, rank);
  }
  for (RankIndex rank = 0; rank < spec_.decode.rank_count(); ++rank) {
    attach(false, rank);
  }
}

RoomWorld::~RoomWorld() {
  // The fabrics report their end to the queues, so they go first.
  send_fabric_.reset();
  receive_fabric_.reset();
}

std::shared_ptr<Pool> RoomWorld::new_pool(const Topology& topology, RankIndex rank, std::byte guard) const {
  PoolLayout layout;
  layout.rank = rank;
  layout.page_size = spec_.page_size;
  std::uint64_t offset = 0;
  for (const BufferShape& shape : rank_buffers(spec_.model, topology, topology.coord(rank), spec_.pages)) {
    layout.buffers.push_back(BufferPlace{shape, 0, offset});
    offset += shape.pages * spec_.page_size * shape.row_bytes;
  }
  layout.aux = {AuxField{"output_ids", 64, 64, 1, 0}, AuxField{kAuxRoomField, 64, 64, 1, 64 * 64}};
  return make_pool(std::move(layout), guard);
}

void RoomWorld::attach(bool prefill_side, RankIndex rank) {
  Engine& engine = (prefill_side ? prefill_engines_ : decode_engines_)[rank];
  engine.id = next_engine_++;
  engine.pool = new_pool(prefill_side ? spec_.prefill : spec_.decode, rank, kGuard);
  for (std::uint32_t page = 0; page < spec_.pages; ++page) {
    engine.free_pages.push_back(page);
  }
  if (prefill_side) {
    KVF_CHECK(prefill.attach(engine.id, rank, engine.pool).has_value());
  } else {
    KVF_CHECK(decode.attach(engine.id, rank, engine.pool).has_value());
    receive_fabric_->add_pool(engine.pool);
  }
}

std::vector<std::uint32_t> RoomWorld::take(Engine& engine, std::uint64_t count) {
  std::vector<std::uint32_t> out;
  while (out.size() < count && !engine.free_pages.empty()) {
    // Most recently freed first: a page that went back too early is used again at once.
    out.push_back(engine.free_pages.back());
    engine.watched.erase(engine.free_pages.back());
    engine.free_pages.pop_back();
  }
  KVF_CHECK(out.size() == count);
  return out;
}

Result<void> RoomWorld::expect(RankIndex rank, Room room, std::uint64_t tokens, std::uint64_t prefix,
                               bool aux) {
  Engine& engine = decode_engines_.at(rank);
  const std::uint64_t page = std::uint64_t{spec_.page_size} * spec_.decode.dcp;
  Use use{use_of_room_.contains(room) ? use_of_room_[room] : 0,
          take(engine, (tokens - prefix + page - 1) / page), prefix, tokens,
          aux ? static_cast<int>(room % 64) : -1};
  EngineExpectation want{room, "prefill:8998", use.pages, prefix, tokens, use.aux_slot, -1};
  decode::Actions actions;
  const auto accepted = decode.expect(now_, engine.id, std::move(want), kService, actions);
  if (accepted) {
    engine.held[room] = use.pages;
    engine.uses[room] = std::move(use);
  } else {
    engine.free_pages.insert(engine.free_pages.end(), use.pages.begin(), use.pages.end());
  }
  perform(actions);
  return accepted;
}

void RoomWorld::expect_all(Room room, std::uint64_t tokens, std::uint64_t prefix, bool aux) {
  for (auto& [rank, engine] : decode_engines_) {
    KVF_CHECK(expect(rank, room, tokens, prefix, aux).has_value());
  }
}

void RoomWorld::fill(Engine& engine, RankIndex rank, Room room, const std::vector<std::uint32_t>& pages,
                     std::uint64_t first, std::uint64_t count) {
  const Ownership mine = ownership(spec_.prefill, spec_.model, spec_.prefill.coord(rank));
  for (std::uint32_t b = 0; b < engine.pool->buffer_count(); ++b) {
    const BufferShape& shape = engine.pool->layout().buffers[b].shape;
    const std::uint64_t head_bytes = spec_.model.head_bytes(shape.kind);
    for (std::uint64_t t = first; t < first + count; ++t) {
      if (!mine.tokens.owns(t)) {
        continue;
      }
      const std::uint64_t local = mine.tokens.owned_before(t) - mine.tokens.owned_before(first);
      const std::uint64_t row =
          std::uint64_t{pages[local / spec_.page_size]} * spec_.page_size + local % spec_.page_size;
      for (std::uint64_t i = 0; i < shape.row_bytes; ++i) {
        engine.pool->buffer(b)[row * shape.row_bytes + i] =
            content(use_of_room_[room], shape, mine.heads.begin * head_bytes + i, t);
      }
    }
  }
}

Result<void> RoomWorld::send(RankIndex rank, Room room, std::uint64_t first, std::uint64_t count, bool last,
                             bool aux) {
  Engine& engine = prefill_engines_.at(rank);
  const std::uint64_t page = std::uint64_t{spec_.page_size} * spec_.prefill.dcp;
  const auto pages = take(engine, (count + page - 1) / page);
  fill(engine, rank, room, pages, first, count);
  EngineChunk chunk;
  chunk.room = room;
  chunk.pages = pages;
  chunk.first_token = first;
  chunk.token_count = count;
  chunk.last = last;
  chunk.begun = engine.held.contains(room) && !engine.held.at(room).empty();
  std::vector<prefill::AuxBytes> row;
  if (last && aux) {
    std::vector<std::byte> ids(64, std::byte{0x11});
    std::vector<std::byte> id(64);
    std::memcpy(id.data(), &room, sizeof room);
    row = {{"output_ids", ids}, {kAuxRoomField, id}};
  }
  prefill::Actions actions;
  const auto sent = prefill.send(now_, engine.id, std::move(chunk), 0, std::move(row), actions);
  auto& held = engine.held[room];
  held.insert(held.end(), pages.begin(), pages.end());
  if (!sent) {
    held.resize(held.size() - pages.size());
    engine.free_pages.insert(engine.free_pages.end(), pages.begin(), pages.end());
  }
  perform(actions);
  return sent;
}

void RoomWorld::send_all(Room room, std::uint64_t tokens, std::uint64_t chunk, std::uint64_t first) {
  for (auto& [rank, engine] : prefill_engines_) {
    std::uint64_t at = first;
    do {
      const std::uint64_t count = std::min(chunk, tokens - at);
      KVF_CHECK(send(rank, room, at, count, at + count == tokens).has_value());
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

void RoomWorld::connect() {
  const auto offer = receive_fabric_->offer(kPrefillPeer);
  KVF_CHECK(offer.has_value());
  send_fabric_->connect(kDecodePeer, *offer);
  network_.run();
  prefill.peer_connected(kDecodePeer, "decode", spec_.decode);
  connected_ = true;
  prefill::Actions sending;
  for (const message::RankUp& up : decode.announcements()) {
    prefill.on_message(now_, kDecodePeer, *decode_control(encode(up)), sending);
  }
  prefill.peer_ready(now_, kDecodePeer, sending);
  perform(sending);
  decode::ServiceInfo info;
  info.topology = spec_.prefill;
  for (const auto& [rank, engine] : prefill_engines_) {
    info.peers[rank] = kPrefillPeer;
  }
  decode::Actions receiving;
  decode.peer_ready(now_, kPrefillPeer, receive_fabric_->receiver_places_bytes(), receiving);
  decode.service_ready(now_, kService, std::move(info), receiving);
  perform(receiving);
}

bool RoomWorld::step(Rng& rng) {
  std::vector<int> able;
  const bool has[] = {!to_prefill_.empty(), !to_decode_.empty(), !prefill_fabric_events_.empty(),
                      !decode_fabric_events_.empty(), !network_.idle()};
  for (int i = 0; i < 5; ++i) {
    if (has[i]) {
      able.push_back(i);
    }
  }
  if (able.empty()) {
    return false;
  }
  ++now_;
  prefill::Actions sending;
  decode::Actions receiving;
  switch (able[rng.below(able.size())]) {
    case 0:
      prefill.on_message(now_, kDecodePeer, *decode_control(to_prefill_.front()), sending);
      to_prefill_.pop_front();
      break;
    case 1:
      decode.on_message(now_, kPrefillPeer, *decode_control(to_decode_.front()), receiving);
      to_decode_.pop_front();
      break;
    case 2:
      if (const auto* done = std::get_if<fabric_event::ChunkDone>(&prefill_fabric_events_.front())) {
        bytes_posted += done->bytes;
        bytes_by_prefill_rank[done->key.prefill_rank] += done->bytes;
      }
      drains += std::holds_alternative<fabric_event::Drained>(prefill_fabric_events_.front()) ? 1 : 0;
      prefill.on_fabric(now_, prefill_fabric_events_.front(), sending);
      prefill_fabric_events_.pop_front();
      break;
    case 3:
      decode.on_fabric(now_, decode_fabric_events_.front(), receiving);
      decode_fabric_events_.pop_front();
      break;
    default:
      network_.step(rng.next());
      break;
  }
  perform(sending);
  perform(receiving);
  check_watched();
  return true;
}

void RoomWorld::run() {
  Rng rng(spec_.seed);
  while (step(rng)) {
  }
}

void RoomWorld::advance(std::chrono::nanoseconds by) {
  now_ += by.count();
  prefill::Actions sending;
  prefill.tick(now_, sending);
  perform(sending);
  decode::Actions receiving;
  decode.tick(now_, receiving);
  perform(receiving);
}

void RoomWorld::lose_connection() {
  to_prefill_.clear();
  to_decode_.clear();
  prefill::Actions sending;
  prefill.peer_lost(now_, kDecodePeer, Error{Code::kPeerLost, "decode daemon 'decode' lost"}, sending);
  perform(sending);
  decode::Actions receiving;
  decode.peer_lost(now_, kPrefillPeer, Error{Code::kPeerLost, "prefill daemon 'prefill' lost"}, receiving);
  perform(receiving);
}

void RoomWorld::perform(prefill::Actions& actions) {
  for (prefill::Action& action : actions) {
    if (auto* post = std::get_if<prefill::PostChunk>(&action)) {
      send_fabric_->post(post->peer, std::move(post->job));
    } else if (const auto* digest = std::get_if<prefill::DigestChunk>(&action)) {
      prefill::Actions more;
      prefill.digest_done(now_, digest->key, digest->chunk, compute_digest(*digest->task), more);
      perform(more);
    } else if (const auto* cancel = std::get_if<prefill::CancelTransfer>(&action)) {
      send_fabric_->cancel(cancel->peer, cancel->key);
    } else if (const auto* fence = std::get_if<prefill::FencePeer>(&action)) {
      send_fabric_->fence(fence->peer);
    } else if (const auto* message = std::get_if<prefill::SendMessage>(&action)) {
      to_decode_.push_back(encode(message->message));
    } else if (const auto* event = std::get_if<prefill::TellEngine>(&action)) {
      deliver_event(true, event->engine, event->event);
    }
  }
}

void RoomWorld::perform(decode::Actions& actions) {
  for (decode::Action& action : actions) {
    if (auto* open = std::get_if<decode::OpenGrant>(&action)) {
      receive_fabric_->open(std::move(open->grant));
    } else if (const auto* verify = std::get_if<decode::VerifyRoom>(&action)) {
      decode::Actions more;
      decode.digest_done(now_, verify->key, compute_digest(*verify->task), more);
      perform(more);
    } else if (const auto* close = std::get_if<decode::CloseGrant>(&action)) {
      for (std::size_t i = 0; i < close->peers.size(); ++i) {
        receive_fabric_->close(close->key);
      }
    } else if (const auto* fence = std::get_if<decode::FencePeer>(&action)) {
      receive_fabric_->fence(fence->peer);
    } else if (const auto* message = std::get_if<decode::SendMessage>(&action)) {
      to_prefill_.push_back(encode(message->message));
    } else if (const auto* event = std::get_if<decode::TellEngine>(&action)) {
      deliver_event(false, event->engine, event->event);
    } else if (const auto* release = std::get_if<decode::ReleasePool>(&action)) {
      receive_fabric_->remove_pool(release->rank);
    }
  }
}

void RoomWorld::deliver_event(bool prefill_side, EngineId id, const EngineEvent& event) {
  for (auto& [rank, engine] : prefill_side ? prefill_engines_ : decode_engines_) {
    if (engine.id != id) {
      continue;
    }
    const std::string text = event_text(event);
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
    if (!prefill_side && event.type == EngineEventType::kLanded && engine.uses.contains(event.room)) {
      verify(engine, rank, event.room, event.tokens);
    }
    give_back(engine, event.room, !prefill_side);
  }
}

void RoomWorld::give_back(Engine& engine, Room room, bool watch) {
  for (const std::uint32_t page : engine.held[room]) {
    engine.free_pages.push_back(page);
    if (!watch) {
      continue;
    }
    engine.watched.insert(page);
    for (std::uint32_t b = 0; b < engine.pool->buffer_count(); ++b) {
      const std::uint64_t bytes =
          std::uint64_t{spec_.page_size} * engine.pool->layout().buffers[b].shape.row_bytes;
      std::memset(engine.pool->buffer(b).data() + page * bytes, static_cast<int>(kGuard), bytes);
    }
  }
  engine.held.erase(room);
  engine.uses.erase(room);
}

void RoomWorld::verify(Engine& engine, RankIndex rank, Room room, std::uint64_t) {
  const Use& use = engine.uses.at(room);
  const Ownership mine = ownership(spec_.decode, spec_.model, spec_.decode.coord(rank));
  for (std::uint32_t b = 0; b < engine.pool->buffer_count(); ++b) {
    const BufferShape& shape = engine.pool->layout().buffers[b].shape;
    const std::uint64_t head_bytes = spec_.model.head_bytes(shape.kind);
    for (std::uint64_t t = use.prefix; t < use.tokens; ++t) {
      if (!mine.tokens.owns(t)) {
        continue;
      }
      const std::uint64_t local = mine.tokens.owned_before(t) - mine.tokens.owned_before(use.prefix);
      const std::uint64_t row =
          std::uint64_t{use.pages[local / spec_.page_size]} * spec_.page_size + local % spec_.page_size;
      for (std::uint64_t i = 0; i < shape.row_bytes; ++i) {
        const std::byte want = content(use_of_room_[room], shape, mine.heads.begin * head_bytes + i, t);
        if (engine.pool->buffer(b)[row * shape.row_bytes + i] != want) {
          violations.push_back(
              fmt::format("room {} landed with wrong bytes: decode rank {} layer {} token {} byte {}", room,
                          rank, shape.layer, t, i));
          return;
        }
      }
    }
  }
}

void RoomWorld::check_watched() {
  for (auto& [rank, engine] : decode_engines_) {
    for (const std::uint32_t page : engine.watched) {
      for (std::uint32_t b = 0; b < engine.pool->buffer_count(); ++b) {
        const std::uint64_t bytes =
            std::uint64_t{spec_.page_size} * engine.pool->layout().buffers[b].shape.row_bytes;
        const auto span = engine.pool->buffer(b).subspan(page * bytes, bytes);
        if (!std::all_of(span.begin(), span.end(), [](std::byte value) { return value == kGuard; })) {
          violations.push_back(fmt::format(
              "bytes landed in page {} of decode rank {} after it went back to the engine", page, rank));
          std::fill(span.begin(), span.end(), kGuard);
        }
      }
    }
  }
}

std::vector<std::string> RoomWorld::decode_events(RankIndex rank) const {
  return decode_engines_.at(rank).events;
}
std::vector<std::string> RoomWorld::prefill_events(RankIndex rank) const {
  return prefill_engines_.at(rank).events;
}

}  // namespace kvferry::test
