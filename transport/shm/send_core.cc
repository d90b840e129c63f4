#include "transport/shm/send_core.h"

#include <sys/epoll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "common/base/boot_id.h"
#include "common/base/check.h"
#include "kernels/copy.h"
#include "transport/shm/listen_socket.h"

namespace kvferry {
namespace {

constexpr std::uint64_t kMailboxTag = 0;
// A pool frame has about 50 bytes per buffer. Descriptors of a second frame may come along with the first's.
constexpr shm::ChannelLimits kLimits{
    .frame_bytes_max = 1 << 20, .descriptors_max = shm::kDescriptorsMax + 253, .queued_frames_max = 65536};

std::uint64_t machine_memory() {
  return static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES)) *
         static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

Result<std::uint64_t> total_size(const std::vector<UniqueFd>& descriptors) {
  std::uint64_t total = 0;
  for (const UniqueFd& descriptor : descriptors) {
    struct stat status {};
    if (::fstat(descriptor.get(), &status) != 0) {
      return fail(errno_error("fstat of a shm pool's descriptor", errno));
    }
    if (__builtin_add_overflow(total, static_cast<std::uint64_t>(status.st_size), &total)) {
      return fail(Code::kInvalid, "descriptors of a shm pool have more bytes than fit 64 bits");
    }
  }
  return total;
}

}  // namespace

ShmSendFabric::Core::Core(ShmSendOptions options, FabricSink sink)
    : options_(std::move(options)), sink_(std::move(sink)) {}

ShmSendFabric::Core::~Core() {
  if (thread_.joinable()) {
    mailbox_.post(Stop{});
    thread_.join();
  }
  // The sockets close with sessions_, after the last copy: their end tells the peers that nothing can land.
  crew_.reset();
  side_.reset();
}

Result<void> ShmSendFabric::Core::start() {
  if (options_.copy_threads < 1 || options_.copy_threads > 64) {
    return fail(Code::kInvalid, "shm copy_threads is {}, allowed are 1 to 64", options_.copy_threads);
  }
  if (options_.slice_bytes < 4096) {
    return fail(Code::kInvalid, "shm slice_bytes is {}, at least 4096 are needed", options_.slice_bytes);
  }
  if (options_.mapped_bytes_max == 0) {
    options_.mapped_bytes_max = machine_memory();
  }
  host_id_ = boot_id();
  KVF_TRY_VOID(mailbox_.open());
  epoll_.reset(::epoll_create1(EPOLL_CLOEXEC));
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kMailboxTag;
  if (!epoll_ || ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, mailbox_.fd(), &event) != 0) {
    return fail(errno_error("epoll for the shm fabric", errno));
  }
  side_ = std::make_unique<shm::SideThread>();
  shm::CopyCrew::Reports reports;
  reports.finished = [this](LaneId lane, std::uint64_t ticket, Nanos first_post, Nanos last_done) {
    mailbox_.post(Finished{lane, ticket, first_post, last_done});
  };
  reports.idle = [this](LaneId lane) { mailbox_.post(Idle{lane}); };
  crew_ = std::make_unique<shm::CopyCrew>(options_.copy_threads, std::move(reports));
  thread_ = std::thread([this] { run(); });
  return {};
}

void ShmSendFabric::Core::run() {
  std::array<epoll_event, 32> events;
  for (;;) {
    const int count = ::epoll_wait(epoll_.get(), events.data(), events.size(), wait_ms());
    if (!handle_mail()) {
      return;
    }
    for (int i = 0; i < count; ++i) {
      const epoll_event& event = events[static_cast<std::size_t>(i)];
      if (event.data.u64 != kMailboxTag) {
        on_socket(event.data.u64, event.events);
      }
    }
    check_deadlines();
  }
}

bool ShmSendFabric::Core::handle_mail() {
  for (Command& command : mailbox_.take()) {
    if (std::holds_alternative<Stop>(command)) {
      return false;
    }
    std::visit([this](auto& each) { handle(each); }, command);
  }
  return true;
}

ShmSendFabric::Core::Session* ShmSendFabric::Core::session_of(PeerId peer, SessionId* id) {
  const auto found = peers_.find(peer);
  if (found == peers_.end()) {
    return nullptr;
  }
  if (id != nullptr) {
    *id = found->second;
  }
  return sessions_.at(found->second).get();
}

void ShmSendFabric::Core::handle(Connect& command) {
  SessionId id = 0;
  if (Session* session = session_of(command.peer, &id)) {
    session->next = std::move(command.offer);
    begin_end(id, *session, Error{Code::kAborted, "shm session replaced by a new one"});
    return;
  }
  auto opened = open_session(command.peer, command.offer);
  if (!opened) {
    sink_(fabric_event::PeerDown{command.peer, std::move(opened).error()});
    return;
  }
  id = next_session_++;
  peers_.emplace(command.peer, id);
  Session& session = *sessions_.emplace(id, std::move(*opened)).first->second;
  watch(id, session);
}

Result<std::unique_ptr<ShmSendFabric::Core::Session>> ShmSendFabric::Core::open_session(
    PeerId peer, const FabricOffer& text) {
  if (text.kind != FabricKind::kShm) {
    return fail(Code::kInvalid, "a {} offer was given to the shm fabric", to_string(text.kind));
  }
  KVF_TRY(const shm::Offer offer, shm::parse_offer(text.json));
  if (offer.host_id != host_id_) {
    return fail(Code::kUnavailable,
                "the decode daemon runs on another host (boot id {} there, {} here); choose tcp or ucx",
                offer.host_id, host_id_);
  }
  KVF_TRY(UniqueFd socket, shm::connect_unix(offer.path));
  KVF_TRY_VOID(shm::check_peer_uid(socket.get(), options_.allowed_uids));
  auto session = std::make_unique<Session>();
  session->peer = peer;
  session->epoch = offer.epoch;
  session->welcome_deadline = std::chrono::steady_clock::now() + options_.welcome_wait;
  session->channel = std::make_unique<shm::Channel>(std::move(socket), kLimits);
  KVF_TRY_VOID(session->channel->send(shm::to_text(shm::Hello{offer.token})));
  // A daemon that refuses says why and closes, perhaps before this hello is written: then writing fails, and
  // reading finds the reason.
  (void)session->channel->flush();
  return session;
}

void ShmSendFabric::Core::handle(Fence& command) {
  SessionId id = 0;
  if (Session* session = session_of(command.peer, &id)) {
    session->next.reset();
    begin_end(id, *session, Error{Code::kAborted, "shm session fenced by this daemon"});
  }
}

void ShmSendFabric::Core::on_socket(SessionId id, std::uint32_t events) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end() || found->second->state == State::kEnding) {
    return;
  }
  Session& session = *found->second;
  if ((events & EPOLLOUT) != 0) {
    // A broken socket shows as the end of the stream below.
    (void)session.channel->flush();
    watch(id, session);
  }
  std::vector<std::string> frames;
  auto received = session.channel->receive(frames);
  for (const std::string& text : frames) {
    if (auto handled = on_frame(id, session, text); !handled) {
      begin_end(id, session, std::move(handled).error());
      return;
    }
  }
  if (!received) {
    begin_end(id, session, std::move(received).error());
  } else if (!*received) {
    begin_end(id, session, Error{Code::kPeerLost, "the decode daemon closed its shm session or died"});
  }
}

Result<void> ShmSendFabric::Core::on_frame(SessionId id, Session& session, const std::string& text) {
  KVF_TRY(shm::FromReceiver message, shm::parse_from_receiver(text));
  return std::visit([&](auto& each) { return on_message(id, session, each); }, message);
}

Result<void> ShmSendFabric::Core::on_message(SessionId, Session& session, shm::Welcome& message) {
  if (session.state != State::kConnecting) {
    return fail(Code::kProtocol, "second welcome on a shm session");
  }
  if (message.epoch != session.epoch) {
    return fail(
        Code::kProtocol,
        "the daemon on the shm socket has epoch {:016x}, the handshake named {:016x}; shake hands again",
        message.epoch, session.epoch);
  }
  session.state = State::kMapping;
  session.pools_to_map = message.pools;
  come_up(session);
  return {};
}

Result<void> ShmSendFabric::Core::on_message(SessionId id, Session& session, shm::PoolAdded& message) {
  if (session.state == State::kConnecting) {
    return fail(Code::kProtocol, "shm pool before welcome");
  }
  const RankIndex rank = message.layout.rank;
  KVF_TRY(std::vector<UniqueFd> descriptors, session.channel->take_descriptors(message.fds));
  KVF_TRY(const std::uint64_t bytes, total_size(descriptors));
  drop_pool(id, session, rank);
  if (session.pools.size() >= shm::kPoolsMax) {
    return fail(Code::kExhausted, "decode daemon shows more than {} shm pools", shm::kPoolsMax);
  }
  std::uint64_t mapped = 0;
  for (const auto& [other, pool] : session.pools) {
    mapped += pool.bytes;
  }
  if (bytes > options_.mapped_bytes_max - std::min(mapped, options_.mapped_bytes_max)) {
    // Mapping touches every page, so an absurd size would take the host's memory.
    return fail(
        Code::kExhausted,
        "pool of decode rank {} has {} bytes beside {} mapped already, limit {}; raise mapped_bytes_max",
        rank, bytes, mapped, options_.mapped_bytes_max);
  }
  session.pools[rank] = RemotePool{message.serial, bytes, nullptr, std::nullopt};
  auto parts = std::make_shared<std::pair<PoolLayout, std::vector<UniqueFd>>>(std::move(message.layout),
                                                                              std::move(descriptors));
  side_->run([this, id, rank, serial = message.serial, parts] {
    auto pool = Pool::map(std::move(parts->first), std::move(parts->second));
    if (pool) {
      if (auto locked = (*pool)->lock_for_writing(); !locked) {
        pool = tl::unexpected<Error>(std::move(locked).error());
      }
    }
    mailbox_.post(Mapped{id, rank, serial, std::move(pool)});
  });
  return {};
}

Result<void> ShmSendFabric::Core::on_message(SessionId id, Session& session, shm::PoolGone& message) {
  const auto found = session.pools.find(message.rank);
  if (found != session.pools.end() && found->second.serial == message.serial) {
    drop_pool(id, session, message.rank);
  }
  return {};
}

Result<void> ShmSendFabric::Core::on_message(SessionId, Session&, shm::Refused& message) {
  return fail(std::move(message.error));
}

void ShmSendFabric::Core::drop_pool(SessionId id, Session& session, RankIndex rank) {
  const auto found = session.pools.find(rank);
  if (found == session.pools.end()) {
    return;
  }
  const std::uint64_t serial = found->second.serial;
  // A slice in progress keeps the pool mapped through its work; unmapping is the side thread's.
  side_->run([pool = std::move(found->second.pool)]() mutable { pool.reset(); });
  session.pools.erase(found);
  std::vector<TransferKey> lost;
  for (const auto& [key, transfer] : session.transfers) {
    if (transfer.serial == serial && transfer.state == Transfer::State::kRunning) {
      lost.push_back(key);
    }
  }
  for (const TransferKey& key : lost) {
    fail_transfer(id, session, key,
                  Error{Code::kEngineLost, fmt::format("the pool of decode rank {} was detached", rank)});
  }
}

void ShmSendFabric::Core::handle(Mapped& command) {
  const auto found = sessions_.find(command.session);
  if (found == sessions_.end() || found->second->state == State::kEnding) {
    return;
  }
  Session& session = *found->second;
  // The engine asks for writers once it sees its daemon dead: who takes the lock after that must not write.
  if (session.channel->peer_is_gone()) {
    begin_end(command.session, session,
              Error{Code::kPeerLost, "the decode daemon closed the shm connection"});
    return;
  }
  const auto pool = session.pools.find(command.rank);
  if (pool != session.pools.end() && pool->second.serial == command.serial) {
    if (command.pool) {
      pool->second.pool = std::move(*command.pool);
    } else {
      pool->second.error = std::move(command.pool).error();
    }
  }
  if (session.pools_to_map > 0) {
    --session.pools_to_map;
    come_up(session);
  }
  std::vector<TransferKey> waiting;
  for (const auto& [key, transfer] : session.transfers) {
    if (transfer.parked && key.grant.decode_rank == command.rank) {
      waiting.push_back(key);
    }
  }
  for (const TransferKey& key : waiting) {
    advance(command.session, session, key);
  }
}

void ShmSendFabric::Core::come_up(Session& session) {
  if (session.state == State::kMapping && session.pools_to_map == 0) {
    session.state = State::kUp;
    sink_(fabric_event::PeerUp{
        session.peer, fmt::format("shm {}x {}", options_.copy_threads, to_string(copy_variants().front()))});
  }
}

// Nothing new is copied from here on; what is in progress ends, then the pools are unmapped, then the socket
// closes, which tells the decode daemon that nothing can land any more, then PeerDown.
void ShmSendFabric::Core::begin_end(SessionId id, Session& session, Error reason) {
  if (session.state == State::kEnding) {
    return;
  }
  session.state = State::kEnding;
  session.reason = std::move(reason);
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, session.channel->fd(), nullptr);
  abandon_transfers(session);
  release_when_idle(id, session);
}

void ShmSendFabric::Core::release_when_idle(SessionId id, Session& session) {
  if (session.state != State::kEnding || !session.transfers.empty() || session.releasing) {
    return;
  }
  session.releasing = true;
  auto pools = std::make_shared<std::map<RankIndex, RemotePool>>(std::move(session.pools));
  side_->run([this, id, pools] {
    pools->clear();
    mailbox_.post(Released{id});
  });
}

void ShmSendFabric::Core::handle(Released& command) {
  const auto found = sessions_.find(command.session);
  KVF_CHECK(found != sessions_.end());
  const std::unique_ptr<Session> session = std::move(found->second);
  sessions_.erase(found);
  peers_.erase(session->peer);
  session->channel.reset();
  sink_(fabric_event::PeerDown{session->peer, std::move(session->reason)});
  if (session->next) {
    Connect again{session->peer, std::move(*session->next)};
    handle(again);
  }
}

void ShmSendFabric::Core::watch(SessionId id, Session& session) {
  const std::uint32_t wanted = EPOLLIN | (session.channel->wants_write() ? EPOLLOUT : 0u);
  if (wanted == session.interest || session.state == State::kEnding) {
    return;
  }
  epoll_event event{};
  event.events = wanted;
  event.data.u64 = id;
  const int operation = session.interest == 0 ? EPOLL_CTL_ADD : EPOLL_CTL_MOD;
  KVF_CHECK(::epoll_ctl(epoll_.get(), operation, session.channel->fd(), &event) == 0);
  session.interest = wanted;
}

void ShmSendFabric::Core::check_deadlines() {
  for (auto& [id, error] : std::exchange(ending_, {})) {
    if (const auto found = sessions_.find(id); found != sessions_.end()) {
      begin_end(id, *found->second, std::move(error));
    }
  }
  const auto now = std::chrono::steady_clock::now();
  for (auto& [id, session] : sessions_) {
    if (session->state == State::kConnecting && now >= session->welcome_deadline) {
      begin_end(
          id, *session,
          Error{Code::kDeadline, fmt::format("no welcome from the decode daemon's shm socket within {} ms",
                                             options_.welcome_wait.count())});
    }
  }
  check_parked(now);
}

int ShmSendFabric::Core::wait_ms() const {
  auto next = parked_.empty() ? SteadyTime::max() : parked_.front().deadline;
  for (const auto& [id, session] : sessions_) {
    if (session->state == State::kConnecting) {
      next = std::min(next, session->welcome_deadline);
    }
  }
  if (next == SteadyTime::max()) {
    return -1;
  }
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - std::chrono::steady_clock::now());
  return static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, 3'600'000));
}

}  // namespace kvferry
