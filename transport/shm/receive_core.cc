#include "transport/shm/receive_core.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "common/base/boot_id.h"
#include "common/base/check.h"
#include "common/base/hex.h"
#include "common/base/random.h"
#include "transport/shm/listen_socket.h"

namespace kvferry {
namespace {

constexpr std::uint64_t kMailboxTag = 0;
constexpr std::uint64_t kListenerTag = 1;
constexpr std::size_t kSilentSessionsMax = 64;
// A notice has about 200 bytes; nothing that a sender says is longer.
constexpr shm::ChannelLimits kLimits{
    .frame_bytes_max = 4096, .descriptors_max = 0, .queued_frames_max = 4096};
constexpr std::chrono::milliseconds kAcceptPause{100};

}  // namespace

ShmReceiveFabric::Core::~Core() {
  if (thread_.joinable()) {
    mailbox_.post(Stop{});
    thread_.join();
  }
}

Result<void> ShmReceiveFabric::Core::start() {
  if (options_.epoch == 0) {
    options_.epoch = random_u64();
  }
  host_id_ = boot_id();
  KVF_TRY_VOID(mailbox_.open());
  KVF_TRY(listener_, shm::ListenSocket::open(options_.path, options_.mode));
  epoll_.reset(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll_) {
    return fail(errno_error("epoll for the shm fabric", errno));
  }
  for (const auto& [tag, fd] :
       {std::pair{kMailboxTag, mailbox_.fd()}, std::pair{kListenerTag, listener_.fd()}}) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = tag;
    if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
      return fail(errno_error("epoll for the shm fabric", errno));
    }
  }
  thread_ = std::thread([this] { run(); });
  return {};
}

Result<FabricOffer> ShmReceiveFabric::Core::offer(PeerId peer) {
  shm::Offer offer{host_id_, options_.path, random_hex(), options_.epoch};
  // The mailbox is emptied between reading a frame and acting on it, so the token is known when it is shown.
  mailbox_.post(Admit{peer, offer.token});
  return FabricOffer{FabricKind::kShm, shm::to_text(offer)};
}

void ShmReceiveFabric::Core::run() {
  std::array<epoll_event, 32> events;
  for (;;) {
    const int count = ::epoll_wait(epoll_.get(), events.data(), events.size(), wait_ms());
    handle_mail();
    for (int i = 0; i < count && !stopping_; ++i) {
      const epoll_event& event = events[static_cast<std::size_t>(i)];
      if (event.data.u64 == kListenerTag) {
        accept_all();
      } else if (event.data.u64 != kMailboxTag) {
        on_session_event(event.data.u64, event.events);
      }
    }
    if (stopping_) {
      return;
    }
    drop_silent();
  }
}

void ShmReceiveFabric::Core::handle_mail() {
  for (Command& command : mailbox_.take()) {
    std::visit([this](auto& each) { handle(each); }, command);
  }
}

void ShmReceiveFabric::Core::handle(AddPool& command) {
  const RankIndex rank = command.pool->rank();
  RemovePool earlier{rank};
  handle(earlier);
  const ListedPool& listed = pools_[rank] = ListedPool{next_serial_++, command.pool};
  grants_.add_pool(command.pool);
  for (auto& [id, session] : sessions_) {
    if (session.state == State::kUp) {
      push_pool(id, session, listed);
    }
  }
}

void ShmReceiveFabric::Core::handle(RemovePool& command) {
  const auto found = pools_.find(command.rank);
  if (found == pools_.end()) {
    return;
  }
  const std::string text = shm::to_text(shm::PoolGone{command.rank, found->second.serial});
  pools_.erase(found);
  grants_.remove_pool(command.rank);
  for (auto& [id, session] : sessions_) {
    if (session.state == State::kUp) {
      push(id, session, text);
    }
  }
}

void ShmReceiveFabric::Core::handle(Admit& command) {
  std::erase_if(tokens_, [&](const auto& entry) { return entry.second == command.peer; });
  tokens_.emplace(std::move(command.token), command.peer);
}

void ShmReceiveFabric::Core::handle(Open& command) {
  if (auto opened = grants_.open(std::move(command.grant)); !opened) {
    reject(0, std::move(opened).error());
  }
}

void ShmReceiveFabric::Core::handle(Close& command) {
  grants_.close(command.key);
  sink_(fabric_event::GrantClosed{command.key});
}

void ShmReceiveFabric::Core::handle(Fence& command) {
  std::erase_if(tokens_, [&](const auto& entry) { return entry.second == command.peer; });
  if (const auto found = peers_.find(command.peer); found != peers_.end()) {
    begin_close(sessions_.at(found->second), Error{Code::kAborted, "shm session fenced by this daemon"});
    watch(found->second, sessions_.at(found->second));
  }
}

void ShmReceiveFabric::Core::accept_all() {
  while (!stopping_) {
    UniqueFd socket(::accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket) {
      admit_connection(std::move(socket));
      continue;
    }
    if (errno == EINTR || errno == ECONNABORTED) {
      continue;
    }
    if (errno != EAGAIN && errno != EWOULDBLOCK) {
      // Out of descriptors or memory: the connection stays in the queue, and without a pause epoll would
      // report it again at once, for ever.
      reject(0, errno_error("accept on the shm socket", errno));
      set_accepting(false);
      accept_again_ = std::chrono::steady_clock::now() + kAcceptPause;
    }
    return;
  }
}

void ShmReceiveFabric::Core::set_accepting(bool accepting) {
  accepting_ = accepting;
  epoll_event event{};
  event.events = accepting ? static_cast<std::uint32_t>(EPOLLIN) : 0u;
  event.data.u64 = kListenerTag;
  KVF_CHECK(::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, listener_.fd(), &event) == 0);
}

void ShmReceiveFabric::Core::admit_connection(UniqueFd socket) {
  const int fd = socket.get();
  const SessionId id = next_session_++;
  const auto deadline = std::chrono::steady_clock::now() + options_.hello_wait;
  Session& session =
      sessions_.emplace(id, Session{shm::Channel(std::move(socket), kLimits), deadline}).first->second;
  if (auto allowed = shm::check_peer_uid(fd, options_.allowed_uids); !allowed) {
    refuse(id, std::move(allowed).error());
    return;
  }
  watch(id, session);
  // Most connections bring their hello along, or have gone already; only those that stay silent count.
  on_session_event(id, EPOLLIN);
  const auto silent = std::count_if(sessions_.begin(), sessions_.end(),
                                    [](const auto& entry) { return entry.second.state == State::kHello; });
  const auto found = sessions_.find(id);
  if (found != sessions_.end() && found->second.state == State::kHello &&
      static_cast<std::size_t>(silent) > kSilentSessionsMax) {
    refuse(id, Error{Code::kExhausted, fmt::format("{} shm connections wait for their hello, limit {}",
                                                   silent - 1, kSilentSessionsMax)});
  }
}

void ShmReceiveFabric::Core::on_session_event(SessionId id, std::uint32_t events) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) {
    return;
  }
  Session& session = found->second;
  if (session.state == State::kClosing) {
    if (!session.channel.discard()) {
      end_session(id, session.reason);
    }
    return;
  }
  if ((events & EPOLLOUT) != 0) {
    // A broken socket shows as the end of the stream below.
    (void)session.channel.flush();
    watch(id, session);
  }
  std::vector<std::string> frames;
  auto received = session.channel.receive(frames);
  // A frame may answer to a command posted only a moment ago: the notice of a grant, the hello of an offer.
  // What caused the frame was posted before the frame was sent, so it is in the mailbox now, and maybe not
  // before.
  handle_mail();
  if (stopping_ || session.state == State::kClosing) {
    return;
  }
  for (const std::string& text : frames) {
    if (!on_frame(id, text)) {
      return;
    }
  }
  if (!received && received.error().code != Code::kPeerLost) {
    refuse(id, std::move(received).error());
  } else if (!received || !*received) {
    end_session(id, Error{Code::kPeerLost, "the prefill daemon closed its shm session or died"});
  }
}

bool ShmReceiveFabric::Core::on_frame(SessionId id, const std::string& text) {
  Session& session = sessions_.at(id);
  auto message = shm::parse_from_sender(text);
  if (!message) {
    refuse(id, std::move(message).error());
    return false;
  }
  if (const auto* hello = std::get_if<shm::Hello>(&*message)) {
    return on_hello(id, session, *hello);
  }
  if (session.state != State::kUp) {
    refuse(id, Error{Code::kUnauthorized, "a shm session starts with hello and its token"});
    return false;
  }
  on_notice(session, std::get<shm::Notice>(*message));
  return true;
}

bool ShmReceiveFabric::Core::on_hello(SessionId id, Session& session, const shm::Hello& hello) {
  if (const auto known = tokens_.find(hello.token); known != tokens_.end()) {
    settle(known->second);  // may take mail, and so withdraw the token
  }
  const auto token = tokens_.find(hello.token);
  if (session.state != State::kHello || token == tokens_.end()) {
    refuse(id,
           Error{Code::kUnauthorized,
                 "the shm token is unknown here: it was used, replaced or made by an earlier life of this "
                 "daemon; shake hands again"});
    return false;
  }
  const PeerId peer = token->second;
  if (peers_.contains(peer)) {
    refuse(id, Error{Code::kConflict, "this peer has a shm session already; it must end first"});
    return false;
  }
  tokens_.erase(token);
  session.state = State::kUp;
  session.peer = peer;
  peers_.emplace(peer, id);
  push(id, session, shm::to_text(shm::Welcome{options_.epoch, static_cast<std::uint32_t>(pools_.size())}));
  for (const auto& [rank, listed] : pools_) {
    push_pool(id, session, listed);
  }
  return session.state == State::kUp;
}

// A peer that connects anew has closed its old socket before, but epoll may report the new one first, and
// accept_all() may take a connection that came after epoll did. What is left in a closed socket is bounded.
void ShmReceiveFabric::Core::settle(PeerId peer) {
  for (auto found = peers_.find(peer);
       found != peers_.end() && sessions_.at(found->second).channel.peer_is_gone();
       found = peers_.find(peer)) {
    on_session_event(found->second, EPOLLIN);
  }
}

void ShmReceiveFabric::Core::on_notice(Session& session, const shm::Notice& notice) {
  const RankIndex rank = notice.key.grant.decode_rank;
  const auto pool = pools_.find(rank);
  if (pool == pools_.end() || pool->second.serial != notice.serial) {
    reject(session.peer,
           Error{Code::kNotFound,
                 fmt::format(
                     "room {}: its bytes went into pool {} of decode rank {}, which is not attached any more",
                     notice.key.grant.room, notice.serial, rank)});
    return;
  }
  // To the table, everything that was copied is one block that has arrived. The notice goes first: it is what
  // refuses a repetition, an unknown grant and a foreign source.
  BlockHeader block = make_notice(notice.key, notice.bytes, 1);
  auto landed = grants_.notice(block, session.peer);
  if (landed) {
    block.payload_bytes = notice.bytes;
    landed = grants_.arrived(block, session.peer);
  }
  if (!landed) {
    reject(session.peer, std::move(landed).error().error);
  } else if (*landed) {
    sink_(std::move(**landed));
  }
}

void ShmReceiveFabric::Core::push(SessionId id, Session& session, std::string text,
                                  std::shared_ptr<const Pool> pool) {
  if (session.state == State::kClosing) {
    return;
  }
  if (auto queued = session.channel.send(std::move(text), std::move(pool)); !queued) {
    reject(session.peer, queued.error());
    begin_close(session, std::move(queued).error());
  } else {
    // A broken socket shows as the end of the stream.
    (void)session.channel.flush();
  }
  watch(id, session);
}

void ShmReceiveFabric::Core::push_pool(SessionId id, Session& session, const ListedPool& listed) {
  const shm::PoolAdded message{listed.serial, static_cast<std::uint32_t>(listed.pool->fds().size()),
                               listed.pool->layout()};
  push(id, session, shm::to_text(message), listed.pool);
}

void ShmReceiveFabric::Core::reject(PeerId peer, Error error) {
  sink_(fabric_event::Rejected{peer, std::move(error)});
}

// A session without a peer owns nothing and is dropped. A peer may be copying at this moment, so its session
// ends only when it has let go.
void ShmReceiveFabric::Core::refuse(SessionId id, Error error) {
  Session& session = sessions_.at(id);
  reject(session.peer, error);
  if (session.state == State::kHello) {
    if (session.channel.send(shm::to_text(shm::Refused{error}))) {
      (void)session.channel.flush();
    }
    sessions_.erase(id);
    return;
  }
  begin_close(session, std::move(error));
  watch(id, session);
}

void ShmReceiveFabric::Core::begin_close(Session& session, Error reason) {
  if (session.state == State::kUp) {
    session.state = State::kClosing;
    session.reason = std::move(reason);
    session.channel.shutdown_write();
  }
}

void ShmReceiveFabric::Core::end_session(SessionId id, Error reason) {
  const auto found = sessions_.find(id);
  const State state = found->second.state;
  const PeerId peer = found->second.peer;
  sessions_.erase(found);
  if (state != State::kHello) {
    peers_.erase(peer);
    sink_(fabric_event::PeerDown{peer, std::move(reason)});
  }
}

void ShmReceiveFabric::Core::watch(SessionId id, Session& session) {
  const std::uint32_t wanted = EPOLLIN | (session.channel.wants_write() ? EPOLLOUT : 0u);
  if (wanted == session.interest) {
    return;
  }
  epoll_event event{};
  event.events = wanted;
  event.data.u64 = id;
  const int operation = session.interest == 0 ? EPOLL_CTL_ADD : EPOLL_CTL_MOD;
  KVF_CHECK(::epoll_ctl(epoll_.get(), operation, session.channel.fd(), &event) == 0);
  session.interest = wanted;
}

void ShmReceiveFabric::Core::drop_silent() {
  const auto now = std::chrono::steady_clock::now();
  if (!accepting_ && now >= accept_again_) {
    set_accepting(true);
  }
  std::vector<SessionId> silent;
  for (const auto& [id, session] : sessions_) {
    if (session.state == State::kHello && now >= session.hello_deadline) {
      silent.push_back(id);
    }
  }
  for (const SessionId id : silent) {
    refuse(id, Error{Code::kDeadline,
                     fmt::format("no hello on a shm connection within {} ms", options_.hello_wait.count())});
  }
}

int ShmReceiveFabric::Core::wait_ms() const {
  auto next = SteadyTime::max();
  if (!accepting_) {
    next = accept_again_;
  }
  for (const auto& [id, session] : sessions_) {
    if (session.state == State::kHello) {
      next = std::min(next, session.hello_deadline);
    }
  }
  if (next == SteadyTime::max()) {
    return -1;
  }
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - std::chrono::steady_clock::now());
  return static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, 3'600'000));
}

}  // namespace kvferry
