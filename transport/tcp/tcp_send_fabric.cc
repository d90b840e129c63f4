#include "transport/tcp/tcp_send_fabric.h"

#include <sys/epoll.h>

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "common/base/host_port.h"
#include "transport/tcp/event_loop.h"
#include "transport/tcp/hello.h"
#include "transport/tcp/send_stream.h"

namespace kvferry {
namespace {

// Together at most half of a second-level cache.
constexpr std::size_t kPackBuffers = 4;
constexpr std::size_t kPackBytes = 256 << 10;

}  // namespace

class TcpSendFabric::Impl {
 public:
  Impl(const TcpSendConfig& config, FabricSink sink, std::unique_ptr<EventLoop> loop)
      : config_(config), sink_(std::move(sink)), loop_(std::move(loop)) {}
  ~Impl() { loop_->stop(); }

  void start() {
    loop_->start("kvf-tcp-send", [this](Nanos now) { return on_turn(now); });
  }
  EventLoop& loop() { return *loop_; }
  void connect(PeerId id, const FabricOffer& offer);
  void post(PeerId id, ChunkJob job);
  void cancel(PeerId id, const TransferKey& key);
  void down(PeerId id, const Error& error);

 private:
  struct Stream {
    SendStream stream;
    EventLoop::WatchId watch = 0;
  };
  struct Peer {
    Peer(PeerId peer, const SendQueueLimits& limits) : id(peer), queue(peer, limits) {}
    PeerId id;
    SendQueue queue;
    std::vector<std::unique_ptr<Stream>> streams;
    std::string name;  // for messages: address and port
    bool up = false;
    Nanos connect_by = kNever;
    std::map<TransferKey, std::size_t> draining;  // answers that are missing
  };

  Nanos on_turn(Nanos now);
  Result<void> open_streams(Peer& peer, const TcpOffer& offer);
  void on_event(PeerId id, Stream* stream, std::uint32_t events);
  void report(Peer& peer, const SendStream::Outcome& outcome);
  void check_up(Peer& peer);
  void rearm(Peer& peer);
  Peer* find(PeerId id);

  const TcpSendConfig config_;
  const FabricSink sink_;
  // Everything below belongs to the loop's thread.
  PackRing ring_{kPackBuffers, kPackBytes};
  std::map<PeerId, std::unique_ptr<Peer>> peers_;
  std::unique_ptr<EventLoop> loop_;
};

TcpSendFabric::Impl::Peer* TcpSendFabric::Impl::find(PeerId id) {
  const auto found = peers_.find(id);
  return found == peers_.end() ? nullptr : found->second.get();
}

Nanos TcpSendFabric::Impl::on_turn(Nanos now) {
  Nanos next = kNever;
  std::vector<PeerId> late;
  for (const auto& [id, peer] : peers_) {
    if (peer->connect_by <= now) {
      late.push_back(id);
    } else {
      next = std::min(next, peer->connect_by);
    }
  }
  for (const PeerId id : late) {
    down(id, Error{Code::kDeadline, fmt::format("connect to {}: no answer in time", find(id)->name)});
  }
  return next;
}

void TcpSendFabric::Impl::connect(PeerId id, const FabricOffer& offer) {
  down(id, Error{Code::kAborted, "the peer is being connected again"});
  auto parsed = parse_tcp_offer(offer);
  if (!parsed) {
    sink_(fabric_event::PeerDown{id, std::move(parsed).error()});
    return;
  }
  auto& peer = peers_[id] = std::make_unique<Peer>(id, config_.queue);
  peer->name = HostPort{parsed->host, parsed->port}.to_string();
  peer->connect_by = steady_now() + config_.connect_deadline;
  if (auto opened = open_streams(*peer, *parsed); !opened) {
    down(id, opened.error());
  }
}

Result<void> TcpSendFabric::Impl::open_streams(Peer& peer, const TcpOffer& offer) {
  for (std::uint32_t i = 0; i < config_.streams; ++i) {
    KVF_TRY(UniqueFd fd, connect_tcp(offer.host, offer.port, config_.socket));
    const TcpHello hello{static_cast<std::uint8_t>(i), static_cast<std::uint8_t>(config_.streams),
                         offer.token};
    peer.streams.push_back(std::make_unique<Stream>(Stream{SendStream(std::move(fd), hello, ring_), 0}));
    Stream* stream = peer.streams.back().get();
    KVF_TRY(stream->watch, loop_->watch(stream->stream.fd(), EPOLLIN | EPOLLOUT,
                                        [this, id = peer.id, stream](std::uint32_t events) {
                                          on_event(id, stream, events);
                                        }));
  }
  return {};
}

void TcpSendFabric::Impl::on_event(PeerId id, Stream* stream, std::uint32_t events) {
  Peer* peer = find(id);
  if (peer == nullptr) {
    return;
  }
  if ((events & EPOLLERR) != 0) {
    down(id,
         socket_error(stream->stream.fd(), peer->up ? "send to " + peer->name : "connect to " + peer->name));
    return;
  }
  SendStream::Outcome outcome;
  Result<void> result = {};
  if ((events & (EPOLLIN | EPOLLHUP)) != 0) {
    result = stream->stream.on_readable(outcome);
  }
  if (result && (events & EPOLLOUT) != 0) {
    result = stream->stream.on_writable(peer->queue, outcome);
  }
  report(*peer, outcome);
  if (!result) {
    Error error = std::move(result).error();
    error.message = fmt::format("{}: {}", peer->name, error.message);
    down(id, error);
    return;
  }
  check_up(*peer);
  rearm(*peer);
}

void TcpSendFabric::Impl::report(Peer& peer, const SendStream::Outcome& outcome) {
  for (const fabric_event::ChunkDone& done : outcome.done) {
    sink_(fabric_event::ChunkDone(done));
  }
  for (const TransferKey& key : outcome.drained) {
    const auto waiting = peer.draining.find(key);
    if (waiting != peer.draining.end() && --waiting->second == 0) {
      peer.draining.erase(waiting);
      sink_(fabric_event::Drained{peer.id, key});
    }
  }
}

void TcpSendFabric::Impl::check_up(Peer& peer) {
  const auto is_up = [](const auto& stream) { return stream->stream.state() == SendStream::State::kUp; };
  if (peer.up || !std::all_of(peer.streams.begin(), peer.streams.end(), is_up)) {
    return;
  }
  peer.up = true;
  peer.connect_by = kNever;
  sink_(fabric_event::PeerUp{peer.id, fmt::format("tcp {}x", peer.streams.size())});
}

void TcpSendFabric::Impl::rearm(Peer& peer) {
  for (const auto& stream : peer.streams) {
    const bool write =
        stream->stream.state() == SendStream::State::kConnecting || stream->stream.wants_write(peer.queue);
    loop_->rearm(stream->watch, EPOLLIN | (write ? EPOLLOUT : 0u));
  }
}

void TcpSendFabric::Impl::post(PeerId id, ChunkJob job) {
  Peer* peer = find(id);
  const TransferKey key = job.key;
  const std::uint64_t ticket = job.ticket;
  if (peer == nullptr) {
    sink_(fabric_event::ChunkFailed{id, key, ticket, Error{Code::kUnavailable, "the peer is not connected"}});
    return;
  }
  if (peer->draining.contains(key)) {
    sink_(
        fabric_event::ChunkFailed{id, key, ticket, Error{Code::kAborted, "the transfer is being cancelled"}});
    return;
  }
  if (auto added = peer->queue.add(std::move(job)); !added) {
    sink_(fabric_event::ChunkFailed{id, key, ticket, std::move(added).error()});
    return;
  }
  for (const fabric_event::ChunkDone& done : peer->queue.collect_empty(key, steady_now())) {
    sink_(fabric_event::ChunkDone(done));
  }
  rearm(*peer);
}

void TcpSendFabric::Impl::cancel(PeerId id, const TransferKey& key) {
  Peer* peer = find(id);
  if (peer == nullptr) {
    sink_(fabric_event::Drained{id, key});
    return;
  }
  peer->queue.cancel(key);
  if (peer->draining.contains(key)) {
    return;  // one Drained answers both
  }
  // Each stream may still carry blocks of it. The receiver answers in stream order, so its answer means that
  // they have been placed or discarded.
  peer->draining[key] = peer->streams.size();
  for (const auto& stream : peer->streams) {
    stream->stream.drain(key);
  }
  rearm(*peer);
}

void TcpSendFabric::Impl::down(PeerId id, const Error& error) {
  const auto found = peers_.find(id);
  if (found == peers_.end()) {
    return;
  }
  for (const auto& stream : found->second->streams) {
    loop_->unwatch(stream->watch);
    // What the system has not sent yet must not arrive any more.
    reset_on_close(stream->stream.fd());
  }
  peers_.erase(found);
  sink_(fabric_event::PeerDown{id, error});
}

Result<std::unique_ptr<TcpSendFabric>> TcpSendFabric::create(const TcpSendConfig& config, FabricSink sink) {
  if (config.streams == 0 || config.streams > kTcpStreamsMax) {
    return fail(Code::kInvalid, "tcp streams per peer is {}, but must be in 1..{}", config.streams,
                kTcpStreamsMax);
  }
  KVF_TRY_VOID(check_options(config.socket));
  KVF_TRY(std::unique_ptr<EventLoop> loop, EventLoop::create(config.spin_max));
  auto impl = std::make_unique<Impl>(config, std::move(sink), std::move(loop));
  impl->start();
  return std::unique_ptr<TcpSendFabric>(new TcpSendFabric(std::move(impl)));
}

TcpSendFabric::TcpSendFabric(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
TcpSendFabric::~TcpSendFabric() = default;

void TcpSendFabric::connect(PeerId peer, const FabricOffer& offer) {
  impl_->loop().post([impl = impl_.get(), peer, offer] { impl->connect(peer, offer); });
}

void TcpSendFabric::post(PeerId peer, ChunkJob job) {
  impl_->loop().post(
      [impl = impl_.get(), peer, job = std::move(job)]() mutable { impl->post(peer, std::move(job)); });
}

void TcpSendFabric::cancel(PeerId peer, const TransferKey& key) {
  impl_->loop().post([impl = impl_.get(), peer, key] { impl->cancel(peer, key); });
}

void TcpSendFabric::fence(PeerId peer) {
  impl_->loop().post([impl = impl_.get(), peer] {
    impl->down(peer, Error{Code::kAborted, "the connection was fenced"});
  });
}

}  // namespace kvferry
