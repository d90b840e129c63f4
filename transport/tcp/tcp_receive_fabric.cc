#include "transport/tcp/tcp_receive_fabric.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <utility>
#include <vector>

#include "transport/grant_table.h"
#include "transport/tcp/event_loop.h"
#include "transport/tcp/hello.h"
#include "transport/tcp/receive_stream.h"

namespace kvferry {
namespace {

constexpr std::size_t kScratchBytes = 256 << 10;  // stays in the second-level cache
constexpr Nanos kSecond = 1'000'000'000;
constexpr std::uint32_t kRejectedPerSecond = 10;
constexpr int kAcceptsPerTurn = 32;  // a flood of connections must not hold up the peers
constexpr Nanos kAcceptPause = kSecond / 10;

}  // namespace

class TcpReceiveFabric::Impl final : public ReceiveStream::Host {
 public:
  Impl(TcpReceiveConfig config, FabricSink sink, UniqueFd listener, std::uint16_t port,
       std::unique_ptr<EventLoop> loop)
      : config_(std::move(config)),
        sink_(std::move(sink)),
        listener_(std::move(listener)),
        port_(port),
        scratch_(kScratchBytes),
        loop_(std::move(loop)) {}
  ~Impl() override { loop_->stop(); }

  Result<void> start();
  EventLoop& loop() { return *loop_; }
  const TcpReceiveConfig& config() const { return config_; }
  std::uint16_t port() const { return port_; }
  GrantTable& table() { return table_; }
  TcpReceiveCounters counters() const;

  void admit_peer(PeerId peer, const TcpToken& token);
  void open(Grant grant);
  void close(const GrantKey& key);
  void fence(PeerId peer);

  // ReceiveStream::Host
  Result<PeerId> greet(const TcpHello& hello) override;
  Admission<Placement> admit(const BlockHeader& header, PeerId peer) override;
  Admission<void> arrived(const BlockHeader& header, PeerId peer) override;
  Admission<void> notice(const BlockHeader& header, PeerId peer) override;
  void discarding(const BlockHeader& header, PeerId peer, const Error& why) override;

 private:
  struct Connection {
    std::unique_ptr<ReceiveStream> stream;
    Nanos hello_by = kNever;
  };
  struct Session {
    TcpToken token = {};
    std::uint32_t streams_seen = 0;  // bit per index
    std::uint32_t count = 0;         // from the first hello
    std::uint32_t open_streams = 0;
  };
  using Id = EventLoop::WatchId;

  Nanos on_turn(Nanos now);
  void on_accept();
  void add_connection(UniqueFd fd);
  void on_event(Id id, std::uint32_t events);
  void after(Id id, ReceiveStream::Progress progress);
  void drop(Id id);
  void end_session(PeerId peer, const Error& error);
  void reject(PeerId peer, const Error& error);
  Session* session_of(const TcpToken& token, PeerId& peer);
  void drop_oldest_stranger();
  Admission<void> report(Admission<std::optional<fabric_event::Landed>> outcome);
  template <class Call>
  auto with_posted(Call call) -> decltype(call());

  const TcpReceiveConfig config_;
  const FabricSink sink_;
  const UniqueFd listener_;
  const std::uint16_t port_;
  std::vector<std::byte> scratch_;

  // Everything below belongs to the loop's thread.
  GrantTable table_;
  std::map<PeerId, Session> sessions_;
  std::map<Id, Connection> connections_;                 // ids ascend, so the first stranger is the oldest
  std::vector<std::unique_ptr<ReceiveStream>> dropped_;  // may be on the stack; freed at the end of the turn
  Id listener_id_ = 0;
  std::uint32_t strangers_ = 0;
  Nanos accept_again_ = kNever;
  Nanos reject_window_ = 0;
  std::uint32_t rejects_in_window_ = 0;

  // Written by the loop's thread and read by any; each is a plain total, so no order is needed.
  std::atomic<std::uint64_t> placed_bytes_{0};
  std::atomic<std::uint64_t> discarded_blocks_{0};
  std::atomic<std::uint64_t> discarded_bytes_{0};
  std::atomic<std::uint64_t> violations_{0};
  std::atomic<std::uint64_t> stranger_total_{0};

  std::unique_ptr<EventLoop> loop_;
};

Result<void> TcpReceiveFabric::Impl::start() {
  KVF_TRY(listener_id_, loop_->watch(listener_.get(), EPOLLIN, [this](std::uint32_t) { on_accept(); }));
  loop_->start("kvf-tcp-recv", [this](Nanos now) { return on_turn(now); });
  return {};
}

TcpReceiveCounters TcpReceiveFabric::Impl::counters() const {
  const auto read = [](const std::atomic<std::uint64_t>& value) {
    return value.load(std::memory_order_relaxed);
  };
  return TcpReceiveCounters{read(placed_bytes_), read(discarded_blocks_), read(discarded_bytes_),
                            read(violations_), read(stranger_total_)};
}

Nanos TcpReceiveFabric::Impl::on_turn(Nanos now) {
  dropped_.clear();
  if (accept_again_ <= now) {
    accept_again_ = kNever;
    loop_->rearm(listener_id_, EPOLLIN);
  }
  Nanos next = accept_again_;
  std::vector<Id> late;
  for (const auto& [id, connection] : connections_) {
    if (connection.hello_by <= now) {
      late.push_back(id);
    } else {
      next = std::min(next, connection.hello_by);
    }
  }
  for (const Id id : late) {
    after(id, {ReceiveStream::End::kFailed, Error{Code::kDeadline, "no complete hello in time"}});
  }
  dropped_.clear();
  return next;
}

void TcpReceiveFabric::Impl::on_accept() {
  for (int i = 0; i < kAcceptsPerTurn; ++i) {
    UniqueFd fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (fd) {
      add_connection(std::move(fd));
      continue;
    }
    if (errno == EINTR || errno == ECONNABORTED) {
      continue;
    }
    if (errno != EAGAIN && errno != EWOULDBLOCK) {
      // Out of descriptors or memory: the listener stays readable, so look away for a while instead of
      // spinning.
      reject(0, errno_error("accept", errno));
      loop_->rearm(listener_id_, 0);
      accept_again_ = steady_now() + kAcceptPause;
    }
    return;
  }
}

void TcpReceiveFabric::Impl::add_connection(UniqueFd fd) {
  if (auto prepared = prepare_tcp(fd.get(), config_.socket); !prepared) {
    return;  // it went away already
  }
  if (strangers_ >= config_.strangers_max) {
    drop_oldest_stranger();
  }
  const int raw = fd.get();
  auto shared_id = std::make_shared<Id>(0);
  const auto id =
      loop_->watch(raw, EPOLLIN, [this, shared_id](std::uint32_t events) { on_event(*shared_id, events); });
  if (!id) {
    reject(0, id.error());
    return;
  }
  *shared_id = *id;
  Connection connection;
  connection.stream = std::make_unique<ReceiveStream>(std::move(fd), *this, scratch_);
  connection.hello_by = steady_now() + config_.hello_deadline;
  connections_.emplace(*id, std::move(connection));
  ++strangers_;
}

void TcpReceiveFabric::Impl::drop_oldest_stranger() {
  for (const auto& [id, connection] : connections_) {
    if (!connection.stream->greeted()) {
      after(id,
            {ReceiveStream::End::kFailed, Error{Code::kExhausted, "too many connections without a hello"}});
      return;
    }
  }
}

void TcpReceiveFabric::Impl::on_event(Id id, std::uint32_t events) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) {
    return;
  }
  ReceiveStream& stream = *found->second.stream;
  if ((events & (EPOLLERR | EPOLLHUP)) != 0) {
    // A reset connection: what it still holds was given up by the sender and must not land.
    after(id, {ReceiveStream::End::kFailed, socket_error(stream.fd(), "receive")});
    return;
  }
  const bool was_stranger = !stream.greeted();
  const ReceiveStream::Progress progress = (events & EPOLLIN) != 0 ? stream.on_readable() : stream.flush();
  const auto still = connections_.find(id);
  if (still == connections_.end()) {
    return;  // a posted call closed it meanwhile
  }
  if (was_stranger && stream.greeted()) {
    still->second.hello_by = kNever;
    --strangers_;
  }
  after(id, progress);
}

void TcpReceiveFabric::Impl::after(Id id, ReceiveStream::Progress progress) {
  ReceiveStream& stream = *connections_.at(id).stream;
  if (progress.end == ReceiveStream::End::kOpen) {
    loop_->rearm(id, (stream.wants_read() ? EPOLLIN : 0u) | (stream.wants_write() ? EPOLLOUT : 0u));
    return;
  }
  if (!stream.greeted()) {
    stranger_total_.fetch_add(1, std::memory_order_relaxed);
    drop(id);
    reject(0, progress.error);
    return;
  }
  const PeerId peer = stream.peer();
  const auto session = sessions_.find(peer);
  const bool others_open = session != sessions_.end() && session->second.open_streams > 1;
  if (progress.end == ReceiveStream::End::kClosed && others_open) {
    // An orderly end of one stream; the others may still hold blocks that the sender counted.
    drop(id);
    return;
  }
  if (progress.error.code == Code::kProtocol) {
    violations_.fetch_add(1, std::memory_order_relaxed);
    reject(peer, progress.error);
  }
  end_session(peer, progress.error);
}

void TcpReceiveFabric::Impl::drop(Id id) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) {
    return;
  }
  ReceiveStream& stream = *found->second.stream;
  if (!stream.greeted() || found->second.hello_by != kNever) {
    --strangers_;
  }
  if (stream.greeted()) {
    if (const auto session = sessions_.find(stream.peer()); session != sessions_.end()) {
      --session->second.open_streams;
    }
  }
  stream.stop();
  loop_->unwatch(id);
  ::shutdown(stream.fd(), SHUT_RDWR);
  dropped_.push_back(std::move(found->second.stream));
  connections_.erase(found);
}

void TcpReceiveFabric::Impl::end_session(PeerId peer, const Error& error) {
  std::vector<Id> ids;
  for (const auto& [id, connection] : connections_) {
    if (connection.stream->greeted() && connection.stream->peer() == peer) {
      ids.push_back(id);
    }
  }
  for (const Id id : ids) {
    drop(id);
  }
  const auto session = sessions_.find(peer);
  if (session == sessions_.end()) {
    return;
  }
  const bool was_connected = session->second.streams_seen != 0;
  sessions_.erase(session);
  if (was_connected) {
    sink_(fabric_event::PeerDown{peer, error});
  }
}

void TcpReceiveFabric::Impl::reject(PeerId peer, const Error& error) {
  const Nanos now = steady_now();
  if (now - reject_window_ >= kSecond) {
    reject_window_ = now;
    rejects_in_window_ = 0;
  }
  // A flood of bad blocks must not become a flood of events; the counters still see each one.
  if (rejects_in_window_ < kRejectedPerSecond) {
    ++rejects_in_window_;
    sink_(fabric_event::Rejected{peer, error});
  }
}

void TcpReceiveFabric::Impl::admit_peer(PeerId peer, const TcpToken& token) {
  if (sessions_.contains(peer)) {
    end_session(peer, Error{Code::kAborted, "the peer was offered a new session"});
  }
  if (sessions_.size() >= config_.peers_max) {
    reject(peer, Error{Code::kExhausted,
                       fmt::format("{} peers are admitted already; raise peers_max", sessions_.size())});
    return;
  }
  sessions_[peer].token = token;
}

TcpReceiveFabric::Impl::Session* TcpReceiveFabric::Impl::session_of(const TcpToken& token, PeerId& peer) {
  Session* found = nullptr;
  for (auto& [id, session] : sessions_) {
    if (tokens_equal(session.token, token)) {
      found = &session;
      peer = id;
    }
  }
  return found;
}

Result<PeerId> TcpReceiveFabric::Impl::greet(const TcpHello& hello) {
  PeerId peer = 0;
  Session* session = session_of(hello.token, peer);
  if (session == nullptr) {
    loop_->run_posted();
    session = session_of(hello.token, peer);
  }
  if (session == nullptr) {
    return fail(Code::kUnauthorized, "the token is unknown, or its session has ended");
  }
  const std::uint32_t bit = std::uint32_t{1} << hello.index;
  if ((session->streams_seen & bit) != 0 || (session->count != 0 && session->count != hello.count)) {
    return fail(Code::kUnauthorized, "stream {} of {} was opened already, or the session has {} streams",
                hello.index, hello.count, session->count);
  }
  session->streams_seen |= bit;
  session->count = hello.count;
  ++session->open_streams;
  return peer;
}

/// A block may overtake the open() that it relies on: the grant travelled through the control connection
/// while this thread was busy. So before a grant counts as unknown, what was posted meanwhile takes effect.
template <class Call>
auto TcpReceiveFabric::Impl::with_posted(Call call) -> decltype(call()) {
  auto outcome = call();
  if (!outcome && outcome.error().discard) {
    loop_->run_posted();
    outcome = call();
  }
  return outcome;
}

Admission<Placement> TcpReceiveFabric::Impl::admit(const BlockHeader& header, PeerId peer) {
  return with_posted([&] { return table_.admit(header, peer); });
}

Admission<void> TcpReceiveFabric::Impl::arrived(const BlockHeader& header, PeerId peer) {
  placed_bytes_.fetch_add(header.payload_bytes, std::memory_order_relaxed);
  return report(table_.arrived(header, peer));
}

Admission<void> TcpReceiveFabric::Impl::notice(const BlockHeader& header, PeerId peer) {
  return report(with_posted([&] { return table_.notice(header, peer); }));
}

Admission<void> TcpReceiveFabric::Impl::report(Admission<std::optional<fabric_event::Landed>> outcome) {
  if (!outcome) {
    return tl::unexpected<Refusal>(std::move(outcome).error());
  }
  if (outcome->has_value()) {
    sink_(fabric_event::Landed(**outcome));
  }
  return {};
}

void TcpReceiveFabric::Impl::discarding(const BlockHeader& header, PeerId peer, const Error& why) {
  discarded_blocks_.fetch_add(1, std::memory_order_relaxed);
  discarded_bytes_.fetch_add(header.payload_bytes, std::memory_order_relaxed);
  reject(peer, why);
}

void TcpReceiveFabric::Impl::open(Grant grant) {
  if (auto opened = table_.open(std::move(grant)); !opened) {
    reject(0, opened.error());
  }
}

void TcpReceiveFabric::Impl::close(const GrantKey& key) {
  table_.close(key);
  for (const auto& [id, connection] : connections_) {
    connection.stream->revoke(key);
  }
  sink_(fabric_event::GrantClosed{key});
}

void TcpReceiveFabric::Impl::fence(PeerId peer) {
  end_session(peer, Error{Code::kAborted, "the connection was fenced"});
}

Result<std::unique_ptr<TcpReceiveFabric>> TcpReceiveFabric::create(TcpReceiveConfig config, FabricSink sink) {
  if (config.advertise.empty()) {
    if (is_wildcard(config.host)) {
      return fail(
          Code::kInvalid,
          "tcp fabric listens on '{}' and peers would not know where to connect; set 'advertise' to this "
          "host's address",
          config.host);
    }
    config.advertise = config.host;
  }
  KVF_TRY(UniqueFd listener, listen_tcp(config.host, config.port, config.socket));
  KVF_TRY(const std::uint16_t port, local_port(listener.get()));
  KVF_TRY(std::unique_ptr<EventLoop> loop, EventLoop::create(config.spin_max));
  auto impl =
      std::make_unique<Impl>(std::move(config), std::move(sink), std::move(listener), port, std::move(loop));
  KVF_TRY_VOID(impl->start());
  return std::unique_ptr<TcpReceiveFabric>(new TcpReceiveFabric(std::move(impl)));
}

TcpReceiveFabric::TcpReceiveFabric(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
TcpReceiveFabric::~TcpReceiveFabric() = default;

void TcpReceiveFabric::add_pool(std::shared_ptr<const Pool> pool) {
  impl_->loop().post([impl = impl_.get(), pool = std::move(pool)] { impl->table().add_pool(pool); });
}

void TcpReceiveFabric::remove_pool(RankIndex rank) {
  impl_->loop().post([impl = impl_.get(), rank] { impl->table().remove_pool(rank); });
}

Result<FabricOffer> TcpReceiveFabric::offer(PeerId peer) {
  const TcpToken token = random_token();
  impl_->loop().post([impl = impl_.get(), peer, token] { impl->admit_peer(peer, token); });
  return to_fabric_offer(TcpOffer{impl_->config().advertise, impl_->port(), token});
}

void TcpReceiveFabric::open(Grant grant) {
  impl_->loop().post(
      [impl = impl_.get(), grant = std::move(grant)]() mutable { impl->open(std::move(grant)); });
}

void TcpReceiveFabric::close(const GrantKey& key) {
  impl_->loop().post([impl = impl_.get(), key] { impl->close(key); });
}

void TcpReceiveFabric::fence(PeerId peer) {
  impl_->loop().post([impl = impl_.get(), peer] { impl->fence(peer); });
}

std::uint16_t TcpReceiveFabric::port() const {
  return impl_->port();
}

TcpReceiveCounters TcpReceiveFabric::counters() const {
  return impl_->counters();
}

}  // namespace kvferry
