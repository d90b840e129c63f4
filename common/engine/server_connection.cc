#include "common/engine/server_connection.h"

#include <sys/socket.h>

#include <algorithm>
#include <boost/asio/post.hpp>
#include <cerrno>
#include <chrono>
#include <utility>

#include "common/base/log.h"

namespace kvferry {

namespace asio = boost::asio;

namespace {

constexpr auto kAttachDeadline = std::chrono::seconds(10);
constexpr std::size_t kReadBytes = 64 * 1024;
// After this many reads the other engines get their turn.
constexpr int kReadsPerTurn = 16;
constexpr std::size_t kFramesPerWrite = 64;

Error surplus_error(std::size_t count) {
  return Error{Code::kProtocol, fmt::format("{} descriptors came that no frame claims", count)};
}

wire::Event to_wire(const EngineEvent& event) {
  const bool has_code = event.type == EngineEventType::kFailed || event.type == EngineEventType::kAborted;
  return wire::Event{static_cast<std::uint32_t>(event.type),
                     event.room,
                     event.tokens,
                     event.bytes,
                     event.transfer_ns,
                     has_code ? static_cast<std::uint8_t>(event.code) : std::uint8_t{0},
                     has_code ? event.reason : std::string{},
                     event.layer_end};
}

}  // namespace

EngineConnection::EngineConnection(asio::io_context& io, const EngineServerOptions& options, Owner& owner,
                                   EngineId id, PeerCredentials peer)
    : io_(io),
      options_(options),
      owner_(&owner),
      id_(id),
      peer_(peer),
      socket_(io),
      attach_timer_(io),
      frames_(options.frame_bytes_max) {}

Result<void> EngineConnection::start(UniqueFd& socket) {
  boost::system::error_code error;
  socket_.assign(asio::local::stream_protocol(), socket.get(), error);
  if (error) {
    return fail(Code::kIo, "watch the socket of engine {} (pid {}): {}", id_, peer_.pid, error.message());
  }
  socket.release();
  attach_timer_.expires_after(kAttachDeadline);
  attach_timer_.async_wait([self = shared_from_this()](const boost::system::error_code& cancelled) {
    if (!cancelled && self->state_ == State::kConnected) {
      self->break_off(
          0, Error{Code::kDeadline, fmt::format("no attach arrived within {} s", kAttachDeadline.count())});
    }
  });
  wait_readable();
  return {};
}

void EngineConnection::wait_readable() {
  socket_.async_wait(asio::socket_base::wait_read,
                     [self = shared_from_this()](const boost::system::error_code& error) {
                       if (!self->alive()) {
                         return;
                       }
                       if (error) {
                         self->end(Error{Code::kIo, error.message()});
                         return;
                       }
                       self->read_some();
                       if (self->alive()) {
                         self->wait_readable();
                       }
                     });
}

void EngineConnection::read_some() {
  std::array<std::byte, kReadBytes> buffer;
  for (int i = 0; i < kReadsPerTurn && alive(); ++i) {
    const auto outcome = read_with_fds(socket_.native_handle(), buffer, fds_, wire::kFdsMax);
    if (!outcome) {
      break_off(0, outcome.error());
      return;
    }
    switch (outcome->state) {
      case ReadState::kNothing:
        return;
      case ReadState::kEnd:
        end(Error{Code::kEngineLost, "the engine closed the connection"});
        return;
      case ReadState::kBytes:
        frames_.append(std::span(buffer).first(outcome->bytes));
        handle_frames();
    }
  }
}

void EngineConnection::handle_frames() {
  while (alive()) {
    const auto frame = frames_.next();
    if (!frame) {
      break_off(0, frame.error());
      return;
    }
    if (!frame->has_value()) {
      break;
    }
    handle_frame(**frame);
  }
  if (alive() && frames_.empty() && !fds_.empty()) {
    break_off(0, surplus_error(fds_.size()));
  }
}

void EngineConnection::handle_frame(std::span<const std::byte> body) {
  const auto envelope = wire::open(body);
  if (!envelope) {
    break_off(0, envelope.error());
    return;
  }
  auto fds = take_fds(envelope->fds);
  if (!fds) {
    break_off(envelope->seq, fds.error());
    return;
  }
  if (frames_.empty() && !fds_.empty()) {
    break_off(envelope->seq, surplus_error(fds_.size()));
    return;
  }
  malformed_ = false;
  const Result<void> outcome = dispatch(*envelope, std::move(*fds));
  if (!alive()) {
    return;  // the handler stopped the server
  }
  if (!outcome && malformed_) {
    break_off(envelope->seq, outcome.error());
    return;
  }
  if (envelope->op == wire::Op::kDetach && outcome) {
    end(Error{Code::kEngineLost, "the engine detached"});
    return;
  }
  reply(envelope->seq, outcome);
}

Result<std::vector<UniqueFd>> EngineConnection::take_fds(std::uint32_t count) {
  if (count > fds_.size()) {
    return fail(Code::kProtocol, "fds is {}, but {} descriptors arrived", count, fds_.size());
  }
  const auto end = fds_.begin() + static_cast<std::ptrdiff_t>(count);
  std::vector<UniqueFd> taken(std::make_move_iterator(fds_.begin()), std::make_move_iterator(end));
  fds_.erase(fds_.begin(), end);
  return taken;
}

namespace {

// A request that decodes to kProtocol ends the connection; the handler's own kProtocol does not.
template <class T>
Result<T> noting(Result<T> decoded, bool& malformed) {
  malformed = !decoded && decoded.error().code == Code::kProtocol;
  return decoded;
}

}  // namespace

Result<void> EngineConnection::dispatch(const wire::Envelope& envelope, std::vector<UniqueFd> fds) {
  switch (envelope.op) {
    case wire::Op::kAttach:
      return attach(envelope, std::move(fds));
    case wire::Op::kDetach:
      return noting(wire::decode_detach(envelope), malformed_);
    case wire::Op::kSend:
    case wire::Op::kExpect:
    case wire::Op::kAbort:
      if (state_ != State::kAttached) {
        return fail(Code::kInvalid, "{} before an accepted attach: attach first", to_string(envelope.op));
      }
      return dispatch_attached(envelope, std::move(fds));
    case wire::Op::kReply:
    case wire::Op::kEvent:
      break;
  }
  malformed_ = true;
  return fail(Code::kProtocol, "op {} is for the other direction", to_string(envelope.op));
}

Result<void> EngineConnection::dispatch_attached(const wire::Envelope& envelope, std::vector<UniqueFd> fds) {
  EngineHandler& handler = owner_->handler();
  if (envelope.op == wire::Op::kSend) {
    KVF_TRY(wire::Send send, noting(wire::decode_send(envelope), malformed_));
    KVF_TRY(EngineChunk chunk, checked_chunk(std::move(send), std::move(fds), limits_));
    return handler.on_send(id_, std::move(chunk));
  }
  if (!fds.empty()) {
    malformed_ = true;
    return fail(Code::kProtocol, "{} came with {} descriptors, it carries none", to_string(envelope.op),
                fds.size());
  }
  if (envelope.op == wire::Op::kExpect) {
    KVF_TRY(wire::Expect expect, noting(wire::decode_expect(envelope), malformed_));
    KVF_TRY(EngineExpectation expectation, checked_expectation(std::move(expect), limits_));
    return handler.on_expect(id_, std::move(expectation));
  }
  KVF_TRY(wire::Abort abort, noting(wire::decode_abort(envelope), malformed_));
  return handler.on_abort(id_, EngineAbort{abort.room, std::move(abort.reason), abort.begun});
}

Result<void> EngineConnection::attach(const wire::Envelope& envelope, std::vector<UniqueFd> fds) {
  if (state_ == State::kAttached) {
    return fail(Code::kInvalid, "second attach on one connection: open another connection for another rank");
  }
  KVF_TRY(wire::Attach request, noting(wire::decode_attach(envelope), malformed_));
  KVF_TRY(EngineAttach checked, checked_attach(std::move(request), std::move(fds), peer_.pid));
  const EngineLimits limits = limits_of(checked.layout);
  KVF_TRY_VOID(owner_->handler().on_attach(id_, std::move(checked)));
  if (state_ == State::kConnected) {
    state_ = State::kAttached;
    limits_ = limits;
    attach_timer_.cancel();
  }
  was_attached_ = true;
  return {};
}

void EngineConnection::send_event(const EngineEvent& event) {
  if (alive()) {
    queue(wire::encode(to_wire(event)));
  }
}

void EngineConnection::reply(std::uint64_t seq, const Result<void>& outcome) {
  wire::Reply message{seq, 0, {}};
  if (!outcome) {
    message.code = static_cast<std::uint8_t>(outcome.error().code);
    message.message = outcome.error().message;
  }
  queue(wire::encode(message));
}

void EngineConnection::break_off(std::uint64_t seq, Error error) {
  if (alive()) {
    reply(seq, fail(error));
    end(error);
  }
}

void EngineConnection::queue(std::string frame) {
  if (out_.size() >= options_.event_queue_max) {
    end(Error{Code::kExhausted,
              fmt::format("the engine does not read: {} events and replies wait, event_queue_max is {}",
                          out_.size(), options_.event_queue_max)});
    return;
  }
  out_.push_back(std::move(frame));
  if (!waiting_writable_) {
    flush();
  }
}

void EngineConnection::flush() {
  while (alive() && !out_.empty()) {
    std::array<iovec, kFramesPerWrite> parts;
    std::size_t count = 0;
    for (std::size_t i = 0; i < std::min(out_.size(), parts.size()); ++i) {
      const std::size_t skip = i == 0 ? out_sent_ : 0;
      parts[count++] = iovec{out_[i].data() + skip, out_[i].size() - skip};
    }
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = count;
    const ssize_t sent = ::sendmsg(socket_.native_handle(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) {
      continue;
    }
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      waiting_writable_ = true;
      socket_.async_wait(asio::socket_base::wait_write,
                         [self = shared_from_this()](const boost::system::error_code&) {
                           self->waiting_writable_ = false;
                           self->flush();
                         });
      return;
    }
    if (sent < 0) {
      const bool gone = errno == EPIPE || errno == ECONNRESET;
      end(gone ? Error{Code::kEngineLost, "the engine closed the connection"}
               : errno_error("write to an engine", errno));
      return;
    }
    auto left = static_cast<std::size_t>(sent);
    while (left > 0) {
      const std::size_t rest = out_.front().size() - out_sent_;
      if (left < rest) {
        out_sent_ += left;
        break;
      }
      left -= rest;
      out_sent_ = 0;
      out_.pop_front();
    }
  }
}

void EngineConnection::end(const Error& reason) {
  if (!alive()) {
    return;
  }
  const bool expected = reason.code == Code::kEngineLost;
  KVF_LOG(expected ? log::Level::kInfo : log::Level::kWarn, "engine connection ends", log::kv("engine", id_),
          log::kv("pid", peer_.pid), log::kv("code", to_string(reason.code)),
          log::kv("reason", reason.message));
  state_ = State::kEnding;
  asio::post(io_, [self = shared_from_this()] {
    if (self->state_ != State::kEnding) {
      return;
    }
    Owner* owner = self->owner_;
    self->close();
    owner->on_connection_end(self->id_, self->was_attached_);
  });
}

void EngineConnection::close() {
  state_ = State::kClosed;
  owner_ = nullptr;
  boost::system::error_code ignored;
  attach_timer_.cancel();
  socket_.close(ignored);
  fds_.clear();
  out_.clear();
}

}  // namespace kvferry
