#include "tests/support/room_world.h"

#include <algorithm>

#include "common/base/check.h"

namespace kvferry::test {
namespace {

constexpr PeerId kDecodePeer = 3;   // the prefill daemon's number for the decode daemon
constexpr PeerId kPrefillPeer = 5;  // the decode daemon's number for the prefill daemon

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

void RoomWorld::attach(bool prefill_side, RankIndex rank) {
  Engine& engine = (prefill_side ? prefill_engines_ : decode_engines_)[rank];
  engine.id = next_engine_++;
  const bool other = !prefill_side && spec_.decode_pools.hidden_layers > 0;
  engine.rank =
      make_room_rank(other ? spec_.decode_pools : spec_.model, prefill_side ? spec_.prefill : spec_.decode,
                     rank, spec_.page_size, spec_.pages);
  for (std::uint32_t page = 0; page < spec_.pages; ++page) {
    engine.free_pages.push_back(page);
  }
  if (prefill_side) {
    KVF_CHECK(prefill.attach(engine.id, rank, engine.rank.pool).has_value());
  } else {
    KVF_CHECK(decode.attach(engine.id, rank, engine.rank.pool).has_value());
    receive_fabric_->add_pool(engine.rank.pool);
  }
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

void RoomWorld::refuse_service(const Error& error) {
  decode::Actions actions;
  decode.service_refused(now_, kService, error, actions);
  perform(actions);
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
      if (const auto* said = std::get_if<message::TransferDigest>(&message->message)) {
        digests[{said->key.prefill_rank, said->key.grant.decode_rank}] = said->digest;
      }
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

void RoomWorld::check_watched() {
  for (auto& [rank, engine] : decode_engines_) {
    engine.watch.check(engine.rank, violations);
  }
}

std::vector<std::string> RoomWorld::decode_events(RankIndex rank) const {
  return decode_engines_.at(rank).events;
}
std::vector<std::string> RoomWorld::prefill_events(RankIndex rank) const {
  return prefill_engines_.at(rank).events;
}

}  // namespace kvferry::test
