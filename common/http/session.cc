#include "common/http/session.h"

#include <fmt/format.h>

#include <algorithm>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/error.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <boost/beast/websocket/rfc6455.hpp>
#include <exception>
#include <optional>

#include "common/base/log.h"
#include "common/http/target.h"
#include "common/http/upgrade.h"

namespace kvferry {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using boost::system::error_code;

namespace {

constexpr std::chrono::milliseconds kLinger{1000};
constexpr std::size_t kReadBytes = 16 << 10;

// By style nothing throws; a handler that does all the same (a library underneath, out of memory in one
// request) must not take the daemon down. This is the only place that catches.
template <class Call>
auto guarded(const std::string& path, Call call) -> std::optional<decltype(call())> {
  try {
    return call();
  } catch (const std::exception& error) {
    KVF_LOG_ERROR("an HTTP handler threw", log::kv("path", path), log::kv("error", error.what()));
  } catch (...) {
    KVF_LOG_ERROR("an HTTP handler threw", log::kv("path", path));
  }
  return std::nullopt;
}

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) {
    c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  }
  return out;
}

bool has_body(int status) {
  return status >= 200 && status != 204 && status != 304;
}

std::string head_of(const HttpResponse& response, bool keep_alive) {
  const auto reason = http::obsolete_reason(http::int_to_status(static_cast<unsigned>(response.status)));
  std::string out =
      fmt::format("HTTP/1.1 {} {}\r\nServer: kvferry\r\nConnection: {}\r\n", response.status,
                  std::string_view(reason.data(), reason.size()), keep_alive ? "keep-alive" : "close");
  if (has_body(response.status)) {
    out += fmt::format("Content-Length: {}\r\n", response.body.size());
    if (!response.content_type.empty() && is_header_value(response.content_type)) {
      out += fmt::format("Content-Type: {}\r\n", response.content_type);
    }
  }
  for (const auto& [name, value] : response.headers) {
    if (is_header_name(name) && is_header_value(value)) {
      out += fmt::format("{}: {}\r\n", name, value);
    }
  }
  return out + "\r\n";
}

}  // namespace

class HttpSession : public std::enable_shared_from_this<HttpSession> {
 public:
  HttpSession(std::shared_ptr<HttpServerState> state, Stream stream, std::shared_ptr<ConnectionSlot> slot);
  ~HttpSession();

  void next_request();
  void refuse(int status, const std::string& message);
  void stop();

 private:
  void begin_request();
  void read_more();
  void on_bytes(error_code failed, std::size_t count);
  void parse();
  bool on_header();
  void on_malformed(error_code failed);
  void answer();
  Result<HttpRequest> take_request();
  void upgrade(const HttpRequest& request, std::shared_ptr<const UpgradeRoute> route);
  void respond(const HttpResponse& response, bool keep_alive, bool with_body = true);
  void on_written(error_code failed);
  void linger();
  void discard();
  void arm(std::chrono::milliseconds limit);
  void on_timer();
  void close();

  enum class Phase : std::uint8_t { kIdle, kReading, kAnswering, kLingering, kClosed };

  std::shared_ptr<HttpServerState> state_;
  Stream stream_;
  std::shared_ptr<ConnectionSlot> slot_;
  std::string remote_;
  asio::steady_timer timer_;
  std::uint64_t timer_round_ = 0;  // a timer handler of an earlier round does nothing
  Phase phase_ = Phase::kIdle;
  bool timed_out_ = false;
  bool header_done_ = false;
  bool keep_alive_ = false;
  beast::flat_buffer buffer_;
  std::optional<http::request_parser<http::string_body>> parser_;
  std::string out_;
};

HttpSession::HttpSession(std::shared_ptr<HttpServerState> state, Stream stream,
                         std::shared_ptr<ConnectionSlot> slot)
    : state_(std::move(state)),
      stream_(std::move(stream)),
      slot_(std::move(slot)),
      remote_(remote_of(stream_)),
      timer_(state_->io),
      buffer_(state_->limits.header_bytes_max + 2 * kReadBytes) {
  state_->sessions.insert(this);
}

HttpSession::~HttpSession() {
  state_->sessions.erase(this);
}

void HttpSession::next_request() {
  phase_ = Phase::kIdle;
  parser_.emplace();
  parser_->header_limit(state_->limits.header_bytes_max);
  parser_->body_limit(state_->limits.body_bytes_max);
  header_done_ = false;
  if (buffer_.size() > 0) {
    begin_request();
    return;
  }
  arm(state_->limits.idle_timeout);
  read_more();
}

void HttpSession::begin_request() {
  phase_ = Phase::kReading;
  arm(state_->limits.request_timeout);
  parse();
}

void HttpSession::read_more() {
  // The parser takes what it can and refuses what is too long, so room is missing only inside a chunk's
  // header.
  const std::size_t room = buffer_.max_size() - buffer_.size();
  if (room == 0) {
    on_malformed(http::error::buffer_overflow);
    return;
  }
  stream_.async_read_some(
      buffer_.prepare(std::min(kReadBytes, room)),
      [self = shared_from_this()](error_code failed, std::size_t count) { self->on_bytes(failed, count); });
}

void HttpSession::on_bytes(error_code failed, std::size_t count) {
  if (phase_ == Phase::kClosed) {
    return;
  }
  // Checked at every read: bytes that keep coming make the timer's cancellation miss.
  if (timed_out_) {
    refuse(408, fmt::format("the request was not complete within {} ms of its first byte",
                            state_->limits.request_timeout.count()));
    return;
  }
  if (failed == asio::error::eof && parser_->got_some()) {
    on_malformed(http::error::partial_message);
    return;
  }
  if (failed) {
    close();
    return;
  }
  buffer_.commit(count);
  if (phase_ == Phase::kIdle) {
    begin_request();
  } else {
    parse();
  }
}

void HttpSession::parse() {
  while (buffer_.size() > 0 && !parser_->is_done()) {
    error_code failed;
    buffer_.consume(parser_->put(buffer_.data(), failed));
    if (failed == http::error::need_more) {
      break;
    }
    if (failed) {
      on_malformed(failed);
      return;
    }
    if (!header_done_ && parser_->is_header_done()) {
      header_done_ = true;
      parser_->eager(true);
      if (!on_header()) {
        return;
      }
    }
  }
  if (parser_->is_done()) {
    answer();
  } else {
    read_more();
  }
}

bool HttpSession::on_header() {
  const auto& head = parser_->get();
  if (head.find(http::field::transfer_encoding) != head.end() && !parser_->chunked()) {
    // Guessing where such a body ends would let its bytes pass for the next request.
    ++state_->stats.malformed;
    refuse(400, "transfer-encoding must end with chunked");
    return false;
  }
  if (head.version() != 11 || parser_->is_done() || buffer_.size() > 0 ||
      !beast::iequals(head[http::field::expect], "100-continue")) {
    return true;
  }
  out_ = "HTTP/1.1 100 Continue\r\n\r\n";
  asio::async_write(stream_, asio::buffer(out_), [self = shared_from_this()](error_code failed, std::size_t) {
    if (failed && !self->timed_out_) {
      self->close();
    } else {
      self->on_bytes({}, 0);
    }
  });
  return false;
}

void HttpSession::on_malformed(error_code failed) {
  ++state_->stats.malformed;
  if (failed == http::error::body_limit) {
    refuse(413, fmt::format("the body is larger than {} bytes", state_->limits.body_bytes_max));
  } else if (failed == http::error::header_limit) {
    refuse(431, fmt::format("the request line and headers are larger than {} bytes",
                            state_->limits.header_bytes_max));
  } else {
    refuse(400, fmt::format("malformed HTTP request: {}", failed.message()));
  }
}

Result<HttpRequest> HttpSession::take_request() {
  const auto& message = parser_->get();
  HttpRequest request;
  request.method = std::string(message.method_string());
  request.target = std::string(message.target());
  KVF_TRY(HttpTarget target, parse_target(request.target));
  request.path = std::move(target.path);
  request.query = std::move(target.query);
  for (const auto& field : message) {
    const std::string_view value(field.value().data(), field.value().size());
    auto [at, fresh] = request.headers.emplace(lower(field.name_string()), value);
    if (!fresh) {
      at->second.append(", ").append(value);
    }
  }
  request.remote = remote_;
  return request;
}

void HttpSession::answer() {
  phase_ = Phase::kAnswering;
  auto request = take_request();
  if (!request) {
    ++state_->stats.malformed;
    refuse(400, request.error().message);
    return;
  }
  ++state_->stats.requests;
  const bool keep_alive = parser_->keep_alive();
  const auto route = state_->upgrades.find(request->path);
  if (route != state_->upgrades.end() && beast::websocket::is_upgrade(parser_->get())) {
    upgrade(*request, route->second);
    return;
  }
  request->body = std::move(parser_->get().body());
  auto response = guarded(request->path, [&] { return state_->handler(*request); });
  respond(response ? *response : http_error(500, "internal error; see the daemon's log"), keep_alive,
          request->method != "HEAD");
}

void HttpSession::upgrade(const HttpRequest& request, std::shared_ptr<const UpgradeRoute> route) {
  auto refusal = guarded(request.path, [&] { return route->admit(request); });
  if (!refusal) {
    refusal.emplace(http_error(500, "internal error; see the daemon's log"));
  }
  if (*refusal) {
    respond(**refusal, true);
    return;
  }
  if (state_->stopped) {
    close();
    return;
  }
  if (buffer_.size() > 0) {
    // A client has to wait for the answer before it sends messages; these bytes would be lost.
    ++state_->stats.malformed;
    refuse(400, "bytes after the upgrade request and before its answer");
    return;
  }
  ++timer_round_;
  timer_.cancel();
  phase_ = Phase::kClosed;
  accept_channel(std::move(stream_), parser_->get(), route->limits, std::move(slot_),
                 [state = state_, request, route](Result<std::shared_ptr<Channel>> channel) {
                   if (state->stopped) {
                     return;
                   }
                   if (!channel) {
                     ++state->stats.malformed;
                     return;
                   }
                   guarded(request.path, [&] {
                     route->accepted(request, *std::move(channel));
                     return true;
                   });
                 });
}

void HttpSession::refuse(int status, const std::string& message) {
  respond(http_error(status, message), false);
}

void HttpSession::respond(const HttpResponse& response, bool keep_alive, bool with_body) {
  phase_ = Phase::kAnswering;
  keep_alive_ = keep_alive && !state_->stopped;
  timed_out_ = false;
  out_ = head_of(response, keep_alive_);
  if (with_body && has_body(response.status)) {
    out_ += response.body;
  }
  parser_.reset();
  arm(state_->limits.request_timeout);
  asio::async_write(stream_, asio::buffer(out_), [self = shared_from_this()](error_code failed, std::size_t) {
    self->on_written(failed);
  });
}

void HttpSession::on_written(error_code failed) {
  if (phase_ == Phase::kClosed) {
    return;
  }
  out_ = {};
  if (failed) {
    close();
  } else if (keep_alive_ && !state_->stopped) {
    next_request();
  } else {
    linger();
  }
}

void HttpSession::linger() {
  phase_ = Phase::kLingering;
  error_code failed;
  stream_.shutdown(Stream::shutdown_send, failed);
  if (failed) {
    close();
    return;
  }
  buffer_.consume(buffer_.size());
  arm(kLinger);
  discard();
}

void HttpSession::discard() {
  stream_.async_read_some(buffer_.prepare(kReadBytes),
                          [self = shared_from_this()](error_code failed, std::size_t) {
                            if (failed) {
                              self->close();
                            } else if (self->phase_ == Phase::kLingering) {
                              self->discard();
                            }
                          });
}

void HttpSession::arm(std::chrono::milliseconds limit) {
  ++timer_round_;
  timer_.expires_after(limit);
  timer_.async_wait([self = shared_from_this(), round = timer_round_](error_code) {
    if (round == self->timer_round_) {
      self->on_timer();
    }
  });
}

void HttpSession::on_timer() {
  switch (phase_) {
    case Phase::kReading: {
      ++state_->stats.timeouts;
      timed_out_ = true;
      error_code ignored;
      stream_.cancel(ignored);  // the handler of what is pending answers 408
      break;
    }
    case Phase::kAnswering:
      ++state_->stats.timeouts;
      close();
      break;
    case Phase::kIdle:
    case Phase::kLingering:
    case Phase::kClosed:
      close();
      break;
  }
}

void HttpSession::stop() {
  if (phase_ != Phase::kAnswering) {
    close();
  }
}

void HttpSession::close() {
  phase_ = Phase::kClosed;
  ++timer_round_;
  timer_.cancel();
  close_stream(stream_);
  slot_.reset();
}

void serve_connection(std::shared_ptr<HttpServerState> state, Stream stream,
                      std::shared_ptr<ConnectionSlot> slot) {
  std::make_shared<HttpSession>(std::move(state), std::move(stream), std::move(slot))->next_request();
}

void refuse_connection(std::shared_ptr<HttpServerState> state, Stream stream,
                       std::shared_ptr<ConnectionSlot> slot) {
  const auto limit = state->limits.connections_max;
  std::make_shared<HttpSession>(std::move(state), std::move(stream), std::move(slot))
      ->refuse(503, fmt::format("too many connections: the limit connections_max is {}", limit));
}

void stop_connections(HttpServerState& state) {
  // Closing never destroys a session here: its pending handlers hold it until the io_context runs them.
  for (HttpSession* session : state.sessions) {
    session->stop();
  }
}

}  // namespace kvferry
