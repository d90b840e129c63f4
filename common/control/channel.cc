#include "common/control/channel.h"

#include <fmt/format.h>

#include <algorithm>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/websocket/error.hpp>
#include <boost/beast/websocket/stream.hpp>
#include <deque>

#include "common/base/check.h"
#include "common/http/call.h"
#include "common/http/channel_stream.h"
#include "common/http/message.h"
#include "common/http/upgrade.h"

namespace kvferry {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace websocket = beast::websocket;
using boost::system::error_code;

namespace {

// No compression: control messages are small, and bytes that a peer can make expand are a risk.
using WebSocket = websocket::stream<ChannelStream, false>;

// What one queued message costs beside its bytes, so that empty ones are bounded too.
constexpr std::uint64_t kQueuedMessageOverhead = 64;
// Beast masks and writes in pieces of this size; its default of 4 KiB costs a system call for each.
constexpr std::size_t kWriteBytes = 64 << 10;
constexpr std::size_t kRefusalTextMax = 512;

std::string close_text(const std::string& reason) {
  std::string out = reason.substr(0, websocket::reason_string::static_capacity);
  std::replace_if(
      out.begin(), out.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  return out;
}

bool is_protocol_error(error_code failed) {
  return failed.category() == websocket::make_error_code(websocket::error::closed).category() &&
         failed != websocket::error::closed;
}

}  // namespace

// Everything of a channel. Its pending operations keep it alive, the Channel is only the owner's end.
class ChannelCore : public std::enable_shared_from_this<ChannelCore> {
 public:
  ChannelCore(Stream stream, const ChannelLimits& limits, std::shared_ptr<void> slot)
      : limits_(limits),
        slot_(std::move(slot)),
        remote_(remote_of(stream)),
        ws_(ChannelStream(std::move(stream))),
        timer_(ws_.get_executor()) {
    set_no_delay(ws_.next_layer());
    ws_.binary(true);
    ws_.auto_fragment(false);
    ws_.write_buffer_bytes(kWriteBytes);
    ws_.read_message_max(limits_.message_bytes_max);
    set_handshake_timeout(limits_.close_timeout);
  }

  WebSocket& socket() { return ws_; }
  const std::string& remote() const { return remote_; }
  std::uint64_t queued_bytes() const { return queued_bytes_; }
  bool is_open() const { return !finished_ && !closing_; }
  // Beast uses one limit for opening and closing; heartbeats and idle limits are the daemons' own.
  void set_handshake_timeout(std::chrono::milliseconds limit) {
    ws_.set_option(websocket::stream_base::timeout{limit, websocket::stream_base::none(), false});
  }

  void start(Channel::OnMessage on_message, Channel::OnClosed on_closed);
  Result<void> send(std::string message);
  void close(std::string reason);
  void abandon();

 private:
  struct Callbacks {
    Channel::OnMessage on_message;
    Channel::OnClosed on_closed;
  };

  void read_next();
  void on_read(error_code failed);
  void on_read_failed(error_code failed);
  void write_next();
  void on_written(error_code failed);
  void begin_close();
  void finish(Error error);

  ChannelLimits limits_;
  std::shared_ptr<void> slot_;
  std::string remote_;
  WebSocket ws_;
  asio::steady_timer timer_;
  beast::flat_buffer buffer_;
  std::deque<std::string> queue_;  // the front is being written
  std::uint64_t queued_bytes_ = 0;
  bool started_ = false;
  bool closing_ = false;        // close() was called
  bool close_started_ = false;  // the queue is flushed, the close frame is on its way
  bool finished_ = false;
  std::string reason_;
  Error ended_;
  std::shared_ptr<Callbacks> callbacks_;
};

void ChannelCore::start(Channel::OnMessage on_message, Channel::OnClosed on_closed) {
  KVF_CHECK(!started_ && on_message != nullptr && on_closed != nullptr);
  started_ = true;
  callbacks_ = std::make_shared<Callbacks>(Callbacks{std::move(on_message), std::move(on_closed)});
  if (finished_) {
    asio::post(ws_.get_executor(), [self = shared_from_this()] {
      if (const auto callbacks = std::move(self->callbacks_)) {
        callbacks->on_closed(self->ended_);
      }
    });
    return;
  }
  if (!close_started_) {
    read_next();
  }
}

Result<void> ChannelCore::send(std::string message) {
  if (!is_open()) {
    return fail(Code::kUnavailable, "the channel to {} is closed: {}", remote_,
                finished_ ? ended_.message : reason_);
  }
  if (message.size() > limits_.message_bytes_max) {
    return fail(Code::kInvalid, "message of {} bytes to {}: the limit message_bytes_max is {}",
                message.size(), remote_, limits_.message_bytes_max);
  }
  const std::uint64_t cost = message.size() + kQueuedMessageOverhead;
  if (queued_bytes_ + cost > limits_.queue_bytes_max) {
    return fail(Code::kExhausted, "{} bytes wait for {} and {} more do not fit: queue_bytes_max is {}",
                queued_bytes_, remote_, cost, limits_.queue_bytes_max);
  }
  queued_bytes_ += cost;
  queue_.push_back(std::move(message));
  if (queue_.size() == 1) {
    write_next();
  }
  return {};
}

void ChannelCore::write_next() {
  ws_.async_write(asio::buffer(queue_.front()),
                  [self = shared_from_this()](error_code failed, std::size_t) { self->on_written(failed); });
}

void ChannelCore::on_written(error_code failed) {
  queued_bytes_ -= queue_.front().size() + kQueuedMessageOverhead;
  queue_.pop_front();
  if (finished_) {
    queue_.clear();
    queued_bytes_ = 0;
    return;
  }
  if (failed) {
    // When the read side knows more (the peer's close reason, a protocol error) its handler comes as well; a
    // write that Beast refuses because of it must not hide that.
    if (started_ && (failed == websocket::error::closed || failed == asio::error::operation_aborted)) {
      queue_.clear();
      queued_bytes_ = 0;
      return;
    }
    finish(Error{Code::kPeerLost, fmt::format("lost {}: write: {}", remote_, failed.message())});
    return;
  }
  if (!queue_.empty()) {
    write_next();
  } else if (closing_) {
    begin_close();
  }
}

void ChannelCore::read_next() {
  ws_.async_read(buffer_,
                 [self = shared_from_this()](error_code failed, std::size_t) { self->on_read(failed); });
}

void ChannelCore::on_read(error_code failed) {
  if (finished_) {
    return;
  }
  if (failed) {
    on_read_failed(failed);
    return;
  }
  if (!ws_.got_binary()) {
    finish(Error{Code::kProtocol, fmt::format("{} sent a text message; only binary ones are used", remote_)});
    return;
  }
  if (!closing_) {
    const auto bytes = buffer_.cdata();
    const auto callbacks = callbacks_;  // the callback may drop the channel, and with it the callbacks
    callbacks->on_message(std::string_view(static_cast<const char*>(bytes.data()), bytes.size()));
  }
  buffer_.consume(buffer_.size());
  // Once the close frame is out, the close operation reads to its answer itself.
  if (!finished_ && !close_started_) {
    read_next();
  }
}

void ChannelCore::on_read_failed(error_code failed) {
  if (close_started_) {
    return;  // the close operation ends too, and reports
  }
  if (failed == websocket::error::closed) {
    const auto& reason = ws_.reason().reason;
    finish(Error{Code::kPeerLost, fmt::format("{} closed the channel: {}", remote_,
                                              std::string_view(reason.data(), reason.size()))});
  } else if (failed == websocket::error::message_too_big) {
    finish(Error{Code::kProtocol, fmt::format("{} sent a message above message_bytes_max = {}", remote_,
                                              limits_.message_bytes_max)});
  } else if (is_protocol_error(failed)) {
    finish(Error{Code::kProtocol,
                 fmt::format("{} broke the WebSocket protocol: {}", remote_, failed.message())});
  } else {
    finish(Error{Code::kPeerLost, fmt::format("lost {}: read: {}", remote_, failed.message())});
  }
}

void ChannelCore::close(std::string reason) {
  if (!is_open()) {
    return;
  }
  closing_ = true;
  reason_ = std::move(reason);
  timer_.expires_after(limits_.close_timeout);
  timer_.async_wait([self = shared_from_this()](error_code cancelled) {
    if (!cancelled) {
      self->finish(Error{Code::kAborted, self->reason_});
    }
  });
  if (queue_.empty()) {
    begin_close();
  }
}

void ChannelCore::begin_close() {
  close_started_ = true;
  const std::string text = close_text(reason_);
  ws_.async_close(
      websocket::close_reason(websocket::close_code::normal, beast::string_view(text.data(), text.size())),
      [self = shared_from_this()](error_code) {
        self->finish(Error{Code::kAborted, self->reason_});
      });
}

void ChannelCore::finish(Error error) {
  if (finished_) {
    return;
  }
  finished_ = true;
  ended_ = std::move(error);
  timer_.cancel();
  close_stream(ws_.next_layer());
  slot_.reset();
  if (const auto callbacks = std::move(callbacks_)) {
    callbacks->on_closed(ended_);
  }
}

void ChannelCore::abandon() {
  callbacks_.reset();
  if (is_open()) {
    finish(Error{Code::kAborted, "dropped by its owner"});
  }
}

Channel::Channel(std::shared_ptr<ChannelCore> core) : core_(std::move(core)) {}

Channel::~Channel() {
  core_->abandon();
}

void Channel::start(OnMessage on_message, OnClosed on_closed) {
  core_->start(std::move(on_message), std::move(on_closed));
}

Result<void> Channel::send(std::string message) {
  return core_->send(std::move(message));
}

void Channel::close(std::string reason) {
  core_->close(std::move(reason));
}

const std::string& Channel::remote() const {
  return core_->remote();
}

std::uint64_t Channel::queued_bytes() const {
  return core_->queued_bytes();
}

bool Channel::is_open() const {
  return core_->is_open();
}

void accept_channel(Stream stream, const UpgradeRequest& request, const ChannelLimits& limits,
                    std::shared_ptr<void> slot, std::function<void(Result<std::shared_ptr<Channel>>)> done) {
  auto core = std::make_shared<ChannelCore>(std::move(stream), limits, std::move(slot));
  core->socket().async_accept(request, [core, done = std::move(done)](error_code failed) {
    if (failed) {
      done(fail(Code::kProtocol, "upgrade of {} failed: {}", core->remote(), failed.message()));
      return;
    }
    done(std::make_shared<Channel>(core));
  });
}

namespace {

Code code_of_refusal(unsigned status) {
  switch (status) {
    case 401:
    case 403:
      return Code::kUnauthorized;
    case 404:
      return Code::kNotFound;
    case 409:
      return Code::kConflict;
    case 422:
      return Code::kMismatch;
    case 429:
      return Code::kExhausted;
    case 503:
      return Code::kUnavailable;
    default:
      return Code::kProtocol;
  }
}

class ConnectCall final : public Call<std::shared_ptr<Channel>> {
 public:
  ConnectCall(asio::io_context& io, const HostPort& to, std::string target, HttpHeaders headers,
              std::chrono::milliseconds timeout, Done done, const ChannelLimits& limits)
      : Call(io, to, fmt::format("channel to {}{}", to.to_string(), target), std::move(done)),
        target_(std::move(target)),
        headers_(std::move(headers)),
        timeout_(timeout),
        limits_(limits) {}

 private:
  void on_connected(Stream stream) override {
    core_ = std::make_shared<ChannelCore>(std::move(stream), limits_, nullptr);
    core_->set_handshake_timeout(timeout_);
    core_->socket().set_option(
        websocket::stream_base::decorator([headers = headers_](websocket::request_type& request) {
          for (const auto& [name, value] : headers) {
            request.set(name, value);
          }
        }));
    core_->socket().async_handshake(
        answer_, host_header(to()), target_,
        [this, self = shared_from_this()](error_code failed) { on_handshake(failed); });
  }

  void on_handshake(error_code failed) {
    if (finished()) {
      return;
    }
    if (!failed) {
      core_->set_handshake_timeout(limits_.close_timeout);
      finish(std::make_shared<Channel>(std::move(core_)));
    } else if (failed == websocket::error::upgrade_declined) {
      finish(fail(code_of_refusal(answer_.result_int()), "{}: answered with {}: {}", what(),
                  answer_.result_int(), answer_.body().substr(0, kRefusalTextMax)));
    } else if (is_handshake_nonsense(failed)) {
      finish(fail(Code::kProtocol, "{}: the answer is not a WebSocket: {}", what(), failed.message()));
    } else {
      finish(fail(Code::kUnavailable, "{}: lost while it was being opened: {}", what(), failed.message()));
    }
  }

  static bool is_handshake_nonsense(error_code failed) {
    namespace http = beast::http;
    const bool ended = failed == http::error::end_of_stream || failed == http::error::partial_message;
    return is_protocol_error(failed) ||
           (failed.category() == http::make_error_code(http::error::bad_method).category() && !ended);
  }

  void release() override {
    if (core_) {
      core_->abandon();
      core_.reset();
    }
  }

  std::string target_;
  HttpHeaders headers_;
  std::chrono::milliseconds timeout_;
  ChannelLimits limits_;
  std::shared_ptr<ChannelCore> core_;
  websocket::response_type answer_;
};

}  // namespace

std::shared_ptr<Pending> connect_channel(asio::io_context& io, const HostPort& to, std::string target,
                                         std::vector<std::pair<std::string, std::string>> headers,
                                         std::chrono::milliseconds timeout,
                                         std::function<void(Result<std::shared_ptr<Channel>>)> done,
                                         ChannelLimits limits) {
  KVF_CHECK(done != nullptr);
  auto sendable = check_sendable("GET", target, headers);
  const auto call = std::make_shared<ConnectCall>(io, to, std::move(target), std::move(headers), timeout,
                                                  std::move(done), limits);
  call->start(timeout, std::move(sendable));
  return std::make_shared<Pending>(call);
}

}  // namespace kvferry
