// Send side: start, connections, and how they end.
#include <ucp/api/ucp.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "transport/ucx/send_core.h"
#include "transport/ucx/settings.h"

namespace kvferry {

using ucx::Message;

namespace {
constexpr std::int64_t kCloseNs = 2'000'000'000;
constexpr std::uint32_t kShmSpans = 128;
constexpr std::uint32_t kTcpSpans = 256;
}  // namespace

Result<std::unique_ptr<UcxSendFabric>> UcxSendFabric::create(const UcxOptions& options, FabricSink sink) {
  auto core = std::make_unique<Core>(options, std::move(sink));
  KVF_TRY_VOID(core->start());
  return std::unique_ptr<UcxSendFabric>(new UcxSendFabric(std::move(core)));
}

UcxSendFabric::UcxSendFabric(std::unique_ptr<Core> core) : core_(std::move(core)) {}
UcxSendFabric::~UcxSendFabric() = default;

void UcxSendFabric::connect(PeerId peer, const FabricOffer& offer) {
  core_->connect(peer, offer);
}
void UcxSendFabric::post(PeerId peer, ChunkJob job) {
  core_->post(peer, std::move(job));
}
void UcxSendFabric::cancel(PeerId peer, const TransferKey& key) {
  core_->cancel(peer, key);
}
void UcxSendFabric::fence(PeerId peer) {
  core_->fence(peer);
}
UcxSendStats UcxSendFabric::stats() const {
  return core_->stats();
}

Result<void> UcxSendFabric::Core::start() {
  cut_limits_ = ucx::kPutModeBlocks;
  if (options_.transports != UcxTransports::kRdma) {
    cut_limits_.payload_bytes_max = ucx::payload_max(options_);
    cut_limits_.spans_max = options_.transports == UcxTransports::kTcp ? kTcpSpans : kShmSpans;
  }
  ucx::Progress::Hooks hooks;
  hooks.on_message = [this](std::uint32_t id, const Message& message) { on_message(id, message); };
  hooks.pump = [this] { pump(); };
  hooks.on_stop = [this] { on_stop(); };
  KVF_TRY(progress_, ucx::Progress::start(options_, std::move(hooks)));
  if (options_.put_mode()) {
    KVF_TRY_VOID(start_puts());
  }
  progress_->begin();
  return {};
}

UcxSendFabric::Core::~Core() {
  // Not by resetting the pointer: on_stop still goes through it.
  if (progress_) {
    progress_->stop();
  }
}

UcxSendStats UcxSendFabric::Core::stats() const {
  // Counters only; nothing is ordered by them.
  return UcxSendStats{blocks_.load(std::memory_order_relaxed), puts_.load(std::memory_order_relaxed),
                      packed_.load(std::memory_order_relaxed), staging_ ? staging_->peak_bytes() : 0,
                      progress_->wakeups()};
}

void UcxSendFabric::Core::connect(PeerId id, const FabricOffer& offer) {
  progress_->submit([this, id, offer] { do_connect(id, offer); });
}
void UcxSendFabric::Core::post(PeerId id, ChunkJob job) {
  auto shared = std::make_shared<ChunkJob>(std::move(job));
  progress_->submit([this, id, shared] { do_post(id, std::move(*shared)); });
}
void UcxSendFabric::Core::cancel(PeerId id, const TransferKey& key) {
  progress_->submit([this, id, key] { do_cancel(id, key); });
}
void UcxSendFabric::Core::fence(PeerId id) {
  progress_->submit([this, id] { do_fence(id); });
}

void UcxSendFabric::Core::do_connect(PeerId id, const FabricOffer& offer) {
  if (find_peer(id) != nullptr) {
    sink_(fabric_event::PeerDown{
        id, Error{Code::kConflict, fmt::format("ucx: peer {} is connected already; fence it first", id)}});
    return;
  }
  auto peer = std::make_unique<Peer>();
  peer->id = id;
  if (auto opened = open_peer(*peer, offer); !opened) {
    sink_(fabric_event::PeerDown{id, std::move(opened).error()});
    return;
  }
  sessions_.emplace(peer->session, peer.get());
  peers_.emplace(id, std::move(peer));
}

Result<void> UcxSendFabric::Core::check_offer(const ucx::OfferText& offer) const {
  if (offer.transports != options_.transports || offer.puts != options_.put_mode()) {
    return fail(
        Code::kMismatch,
        "ucx: prefill uses transports {} (puts {}), decode offers {} (puts {}); set the same on both sides",
        to_string(options_.transports), options_.put_mode(), to_string(offer.transports), offer.puts);
  }
  if (offer.version != ucp_get_version_string()) {
    return fail(Code::kMismatch,
                "ucx: prefill runs UCX {}, decode runs UCX {}; install the same version on both sides",
                ucp_get_version_string(), offer.version);
  }
  return {};
}

Result<void> UcxSendFabric::Core::open_peer(Peer& peer, const FabricOffer& offer) {
  if (offer.kind != FabricKind::kUcx) {
    return fail(Code::kMismatch, "ucx: the offer is for fabric {}", to_string(offer.kind));
  }
  KVF_TRY(const ucx::OfferText text, ucx::decode_offer(offer.json));
  KVF_TRY_VOID(check_offer(text));
  peer.session = ucx::random_session();
  KVF_TRY(auto worker, progress_->worker_for_peer());
  KVF_TRY(peer.endpoint, ucx::Endpoint::open(worker, text.address, ucx::window(options_)));
  std::array<std::byte, ucx::kHelloBytes> hello{};
  ucx::encode_hello(ucx::Hello{text.token, peer.session}, hello);
  peer.outbox.push(ucx::kHello, hello, worker->address());
  peer.connect_deadline = steady_now() + std::int64_t{options_.connect_timeout_ms} * 1'000'000;
  return {};
}

UcxSendFabric::Core::Peer* UcxSendFabric::Core::find_peer(PeerId id) {
  const auto it = peers_.find(id);
  return it == peers_.end() ? nullptr : it->second.get();
}

UcxSendFabric::Core::Peer* UcxSendFabric::Core::find_session(std::span<const std::byte> header) {
  if (header.size() < ucx::kSessionBytes) {
    return nullptr;
  }
  const auto it = sessions_.find(ucx::get_u64(header.data()));
  return it == sessions_.end() ? nullptr : it->second;
}

void UcxSendFabric::Core::on_message(std::uint32_t id, const Message& message) {
  Peer* peer = find_session(message.header);
  if (peer == nullptr || peer->state == Peer::State::kClosing) {
    return;
  }
  switch (id) {
    case ucx::kWelcome:
      on_welcome(*peer);
      break;
    case ucx::kBlock:
      on_block(*peer, message);
      break;
    case ucx::kPoolKeys:
      on_pool(*peer, message);
      break;
    case ucx::kNoPool:
      on_no_pool(*peer, message);
      break;
    case ucx::kBye:
      if (peer->down.message.empty()) {
        peer->down = Error{Code::kPeerLost, "ucx: the decode daemon closed the connection"};
      }
      break;
    default:
      break;
  }
}

void UcxSendFabric::Core::on_welcome(Peer& peer) {
  if (peer.state != Peer::State::kConnecting) {
    return;
  }
  peer.carries = "ucx " + peer.endpoint->lanes();
  if (options_.put_mode() && !options_.allow_emulated_puts && !peer.endpoint->has_rma_lane()) {
    peer.down =
        Error{Code::kUnavailable,
              fmt::format("ucx: puts to this peer would be emulated by messages (lanes: {}), which KVFerry "
                          "refuses; check the RDMA devices of both hosts or use the fabric tcp",
                          peer.endpoint->lanes())};
    return;
  }
  peer.state = Peer::State::kUp;
  sink_(fabric_event::PeerUp{peer.id, peer.carries});
}

void UcxSendFabric::Core::do_fence(PeerId id) {
  if (Peer* peer = find_peer(id); peer != nullptr) {
    begin_close(*peer, Error{Code::kAborted, "ucx: fenced"}, true);
  }
}

void UcxSendFabric::Core::begin_close(Peer& peer, Error error, bool say_bye) {
  if (peer.state == Peer::State::kClosing) {
    return;
  }
  peer.state = Peer::State::kClosing;
  peer.down = std::move(error);
  peer.farewell.begin(*peer.endpoint, peer.outbox, peer.session, say_bye);
}

// True when the peer is gone and its entry must go.
bool UcxSendFabric::Core::finish_close(Peer& peer) {
  if (!peer.farewell.step(*peer.endpoint, peer.outbox)) {
    return false;
  }
  for (const auto& [key, transfer] : peer.transfers) {
    for (std::uint32_t i = 0; i < transfer->cancels; ++i) {
      sink_(fabric_event::Drained{peer.id, key});
    }
  }
  sessions_.erase(peer.session);
  drop_keys(peer);
  sink_(fabric_event::PeerDown{peer.id, peer.down});
  return true;
}

void UcxSendFabric::Core::pump() {
  for (auto it = peers_.begin(); it != peers_.end();) {
    Peer& peer = *it->second;
    pump_peer(peer);
    it = peer.state == Peer::State::kClosing && finish_close(peer) ? peers_.erase(it) : std::next(it);
  }
}

void UcxSendFabric::Core::pump_peer(Peer& peer) {
  if (peer.state == Peer::State::kClosing) {
    return;
  }
  if (peer.endpoint->failed()) {
    Error error = peer.endpoint->error();
    error.code = Code::kPeerLost;
    begin_close(peer, std::move(error), false);
    return;
  }
  if (!peer.down.message.empty()) {
    begin_close(peer, peer.down, true);
    return;
  }
  if (peer.state == Peer::State::kConnecting && steady_now() > peer.connect_deadline) {
    begin_close(peer,
                Error{Code::kDeadline,
                      fmt::format("ucx: the decode daemon did not answer within {} ms; it is gone, or "
                                  "the offer's token is not (or no longer) valid",
                                  options_.connect_timeout_ms)},
                true);
    return;
  }
  peer.outbox.flush(*peer.endpoint);
  if (peer.state == Peer::State::kUp) {
    pump_transfers(peer);
  }
}

void UcxSendFabric::Core::on_stop() {
  for (auto& [id, peer] : peers_) {
    begin_close(*peer, Error{Code::kAborted, "ucx: shutting down"}, true);
  }
  const bool closed = progress_->run_until(
      [this] {
        bool all = true;
        for (const auto& [id, peer] : peers_) {
          if (!peer->farewell.step(*peer->endpoint, peer->outbox)) {
            all = false;
          }
        }
        return all;
      },
      kCloseNs);
  if (!closed) {
    KVF_LOG_WARN("ucx endpoints did not close in time", log::kv("peers", peers_.size()));
  }
  for (auto& [id, peer] : peers_) {
    drop_keys(*peer);
  }
  sources_.clear();
  staging_.reset();
}

}  // namespace kvferry
