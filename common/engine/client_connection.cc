#include "common/engine/client_connection.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <limits>
#include <utility>

namespace kvferry {

namespace {

constexpr std::size_t kReadBytes = 64 * 1024;
// An engine that keeps sending and never asks for events would otherwise grow without end.
constexpr std::size_t kEventsMax = std::size_t{1} << 20;

Error connect_error(const std::string& path, int number) {
  Error error = errno_error(fmt::format("connect to the daemon at {}", path), number);
  const bool forbidden = number == EACCES || number == EPERM;
  error.code = forbidden ? Code::kUnauthorized : Code::kUnavailable;
  error.message += forbidden ? ": the socket's group or mode does not admit this user"
                             : ": is the KVFerry daemon running, and is this its engine socket?";
  return error;
}

bool is_gone(int number) {
  return number == EPIPE || number == ECONNRESET;
}

}  // namespace

Result<std::unique_ptr<ClientConnection>> ClientConnection::connect(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    return fail(Code::kInvalid, "socket_path \"{}\" has {} bytes, legal are 1 to {}", path, path.size(),
                sizeof(address.sun_path) - 1);
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  std::unique_ptr<ClientConnection> connection(new ClientConnection);
  connection->socket_.reset(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!connection->socket_) {
    return fail(errno_error("socket", errno));
  }
  int rc = -1;
  do {
    rc = ::connect(connection->socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  } while (rc != 0 && errno == EINTR);
  if (rc != 0) {
    return fail(connect_error(path, errno));
  }
  KVF_TRY_VOID(connection->open_event_fd());
  return connection;
}

Result<void> ClientConnection::open_event_fd() {
  wake_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  epoll_.reset(::epoll_create1(EPOLL_CLOEXEC));
  if (!wake_ || !epoll_) {
    return fail(errno_error("eventfd and epoll_create1", errno));
  }
  for (const int fd : {socket_.get(), wake_.get()}) {
    epoll_event interest{};
    interest.events = EPOLLIN;
    if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &interest) != 0) {
      return fail(errno_error("epoll_ctl", errno));
    }
  }
  return {};
}

Result<void> ClientConnection::call(std::uint64_t seq, std::string_view frame, std::span<const int> fds,
                                    std::chrono::nanoseconds deadline) {
  if (broken_) {
    return fail(*broken_);
  }
  const Clock::time_point until = Clock::now() + deadline;
  reply_.reset();
  Result<void> written = write_all(frame, fds, until);
  Result<void> answered = written ? wait_reply(seq, until) : written;
  if (!broken_) {
    // Events that arrived right behind the reply: the socket will not announce them again.
    [[maybe_unused]] const Result<void> taken = take_frames();
  }
  update_event_fd();
  return answered;
}

Result<void> ClientConnection::write_all(std::string_view frame, std::span<const int> fds,
                                         Clock::time_point until) {
  alignas(cmsghdr) std::array<char, CMSG_SPACE(wire::kFdsMax * sizeof(int))> control{};
  std::size_t sent = 0;
  while (sent < frame.size()) {
    iovec part{const_cast<char*>(frame.data()) + sent, frame.size() - sent};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (sent == 0 && !fds.empty()) {
      message.msg_control = control.data();
      message.msg_controllen = CMSG_SPACE(fds.size_bytes());
      cmsghdr* item = CMSG_FIRSTHDR(&message);
      item->cmsg_level = SOL_SOCKET;
      item->cmsg_type = SCM_RIGHTS;
      item->cmsg_len = CMSG_LEN(fds.size_bytes());
      std::memcpy(CMSG_DATA(item), fds.data(), fds.size_bytes());
    }
    const ssize_t n = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n >= 0) {
      sent += static_cast<std::size_t>(n);
      continue;
    }
    const int number = errno;
    if (number == EINTR) {
      continue;
    }
    if (number == EAGAIN || number == EWOULDBLOCK) {
      KVF_TRY(const bool ready, wait_socket(POLLOUT, until));
      if (!ready) {
        return broken("the daemon did not read a request in time");
      }
      continue;
    }
    if (is_gone(number)) {
      // The daemon says why before it closes; that sentence is worth more than EPIPE.
      return wait_reply(std::numeric_limits<std::uint64_t>::max(), until);
    }
    if (sent == 0) {
      // Nothing has left, as with a bad descriptor: the connection is as good as before.
      return fail(Code::kInvalid, "{}",
                  errno_error(fmt::format("pass {} descriptors to the daemon", fds.size()), number).message);
    }
    return broken(errno_error("write to the daemon", number).message);
  }
  return {};
}

Result<void> ClientConnection::wait_reply(std::uint64_t seq, Clock::time_point until) {
  while (true) {
    KVF_TRY_VOID(take_frames());
    if (reply_) {
      const wire::Reply reply = *std::exchange(reply_, std::nullopt);
      const Error refusal{code_from_number(reply.code), reply.message};
      if (reply.seq == 0 && reply.code != 0) {
        [[maybe_unused]] const auto remembered = broken(reply.message);
        return fail(refusal);
      }
      if (reply.seq != seq) {
        return broken(fmt::format("the daemon answered request {} instead of {}", reply.seq, seq));
      }
      return reply.code == 0 ? Result<void>() : Result<void>(fail(refusal));
    }
    KVF_TRY(const bool progress, read_some());
    if (!progress) {
      KVF_TRY(const bool ready, wait_socket(POLLIN, until));
      if (!ready) {
        [[maybe_unused]] const auto remembered = broken("the daemon did not answer a request in time");
        return fail(Code::kDeadline,
                    "the daemon did not answer in time; the connection is closed: re-attach");
      }
    }
  }
}

Result<bool> ClientConnection::read_some() {
  std::array<std::byte, kReadBytes> buffer;
  const ssize_t n = ::recv(socket_.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
  if (n > 0) {
    in_.append(std::span(buffer).first(static_cast<std::size_t>(n)));
    return true;
  }
  if (n == 0 || is_gone(errno)) {
    return broken("the daemon closed the connection");
  }
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) {
    return false;
  }
  return broken(errno_error("read from the daemon", errno).message);
}

// Stops at a reply, so that a reply is never overwritten by a later one.
Result<void> ClientConnection::take_frames() {
  while (!reply_) {
    const auto frame = in_.next();
    if (!frame) {
      return broken(frame.error().message);
    }
    if (!frame->has_value()) {
      return {};
    }
    KVF_TRY_VOID(take_frame(**frame));
  }
  return {};
}

Result<void> ClientConnection::take_frame(std::span<const std::byte> body) {
  const auto envelope = wire::open(body);
  if (!envelope) {
    return broken(envelope.error().message);
  }
  if (envelope->op == wire::Op::kReply) {
    auto reply = wire::decode_reply(*envelope);
    if (!reply) {
      return broken(reply.error().message);
    }
    reply_ = std::move(*reply);
    return {};
  }
  if (envelope->op != wire::Op::kEvent) {
    return broken(fmt::format("the daemon sent op {}", to_string(envelope->op)));
  }
  auto event = wire::decode_event(*envelope);
  if (!event) {
    return broken(event.error().message);
  }
  if (events_.size() >= kEventsMax) {
    return broken(fmt::format("{} events wait: call kvf_next_event", events_.size()));
  }
  events_.push_back(std::move(*event));
  return {};
}

Result<std::optional<wire::Event>> ClientConnection::next_event(int timeout_ms) {
  std::optional<Clock::time_point> until;
  if (timeout_ms >= 0) {
    until = Clock::now() + std::chrono::milliseconds(timeout_ms);
  }
  while (true) {
    if (!events_.empty()) {
      wire::Event event = std::move(events_.front());
      events_.pop_front();
      if (event.type >= wire::kFirstFinalEvent) {
        rooms_.erase(event.room);
      }
      update_event_fd();
      return event;
    }
    if (broken_) {
      update_event_fd();
      return fail(*broken_);
    }
    bool progress = false;
    if (const auto read = read_some(); read) {
      progress = *read;
    }
    if (!broken_) {
      [[maybe_unused]] const Result<void> taken = take_frames();
    }
    if (reply_) {
      const wire::Reply reply = *std::exchange(reply_, std::nullopt);
      [[maybe_unused]] const auto remembered =
          broken(reply.seq == 0 ? reply.message : fmt::format("reply {} came without a request", reply.seq));
    }
    if (!broken_ && !progress && events_.empty()) {
      const auto ready = wait_socket(POLLIN, until);
      if (ready && !*ready) {
        return std::nullopt;
      }
    }
  }
}

Result<bool> ClientConnection::wait_socket(short what, std::optional<Clock::time_point> until) {
  pollfd entry{socket_.get(), what, 0};
  while (true) {
    int timeout_ms = -1;
    if (until) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(*until - Clock::now()).count();
      timeout_ms = static_cast<int>(std::clamp<std::int64_t>(left, 0, std::numeric_limits<int>::max()));
    }
    const int rc = ::poll(&entry, 1, timeout_ms);
    if (rc > 0) {
      return true;
    }
    if (rc == 0) {
      return false;
    }
    if (errno != EINTR) {
      return broken(errno_error("poll the daemon's socket", errno).message);
    }
  }
}

void ClientConnection::send_last_words(std::string_view frame) {
  if (!broken_) {
    [[maybe_unused]] const ssize_t n =
        ::send(socket_.get(), frame.data(), frame.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }
}

tl::unexpected<Error> ClientConnection::broken(std::string why) {
  if (!broken_) {
    broken_ = Error{Code::kUnavailable, why + ": re-attach"};
    // The descriptor stays open, so that its number is not reused under an epoll of the engine.
    ::shutdown(socket_.get(), SHUT_RDWR);
    update_event_fd();
  }
  return fail(*broken_);
}

void ClientConnection::update_event_fd() {
  const bool wanted = !events_.empty() || broken_.has_value();
  if (wanted == wake_is_set_) {
    return;
  }
  std::uint64_t value = 1;
  // Neither call can block or fail: the counter is 0 before the write and 1 before the read.
  if (wanted) {
    [[maybe_unused]] const ssize_t n = ::write(wake_.get(), &value, sizeof(value));
  } else {
    [[maybe_unused]] const ssize_t n = ::read(wake_.get(), &value, sizeof(value));
  }
  wake_is_set_ = wanted;
}

}  // namespace kvferry
