#include "common/http/client.h"

#include <fmt/format.h>

#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/error.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/read.hpp>
#include <boost/beast/http/string_body.hpp>
#include <optional>

#include "common/base/check.h"
#include "common/http/dial.h"

namespace kvferry {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using boost::system::error_code;

namespace {

constexpr std::uint32_t kAnswerHeaderBytesMax = 64 << 10;
constexpr int kInterimAnswersMax = 8;  // 1xx answers before the real one

Result<void> check_sendable(const HttpFetch& fetch) {
  if (!is_header_name(fetch.method)) {
    return fail(Code::kInvalid, "HTTP method '{}' cannot be sent", fetch.method);
  }
  if (!is_header_value(fetch.target) || !fetch.target.starts_with('/') ||
      fetch.target.find_first_of(" \t#") != std::string::npos) {
    return fail(Code::kInvalid, "HTTP target '{}' cannot be sent; percent-encode it, with a leading '/'",
                fetch.target);
  }
  if (!is_header_value(fetch.content_type)) {
    return fail(Code::kInvalid, "content type cannot be sent");
  }
  for (const auto& [name, value] : fetch.headers) {
    if (!is_header_name(name) || !is_header_value(value)) {
      return fail(Code::kInvalid, "HTTP header '{}' cannot be sent", name);
    }
  }
  return {};
}

std::string bytes_of(const HttpFetch& fetch) {
  // A zone is meaningful on this host only and must not travel.
  HostPort host = fetch.to;
  host.host = host.host.substr(0, host.host.find('%'));
  std::string out = fmt::format("{} {} HTTP/1.1\r\nHost: {}\r\nUser-Agent: kvferry\r\nConnection: close\r\n",
                                fetch.method, fetch.target, host.to_string());
  for (const auto& [name, value] : fetch.headers) {
    out += fmt::format("{}: {}\r\n", name, value);
  }
  if (!fetch.body.empty() || fetch.method == "POST" || fetch.method == "PUT") {
    out += fmt::format("Content-Length: {}\r\n", fetch.body.size());
    if (!fetch.body.empty() && !fetch.content_type.empty()) {
      out += fmt::format("Content-Type: {}\r\n", fetch.content_type);
    }
  }
  return out + "\r\n" + fetch.body;
}

class FetchOperation : public PendingOperation, public std::enable_shared_from_this<FetchOperation> {
 public:
  FetchOperation(asio::io_context& io, HttpFetch fetch, std::function<void(Result<HttpResponse>)> done)
      : io_(io), fetch_(std::move(fetch)), done_(std::move(done)), timer_(io), stream_(io) {}

  void start() {
    if (auto sendable = check_sendable(fetch_); !sendable) {
      finish_later(std::move(sendable).error());
      return;
    }
    timer_.expires_after(fetch_.timeout);
    timer_.async_wait([self = shared_from_this()](error_code cancelled) {
      if (!cancelled) {
        self->finish(fail(Code::kDeadline, "{} {}{}: no complete answer within {} ms", self->fetch_.method,
                          self->fetch_.to.to_string(), self->fetch_.target, self->fetch_.timeout.count()));
      }
    });
    dial_ = Dial::start(io_, fetch_.to, [self = shared_from_this()](Result<Stream> stream) {
      self->on_connected(std::move(stream));
    });
  }

  void give_up(bool report) override {
    if (!report) {
      finish_silently();
    } else if (done_) {
      finish_later(Error{Code::kAborted, fmt::format("request to {} cancelled", fetch_.to.to_string())});
    }
  }

 private:
  void on_connected(Result<Stream> stream) {
    if (!done_) {
      return;
    }
    if (!stream) {
      finish(fail(std::move(stream).error()));
      return;
    }
    stream_ = *std::move(stream);
    out_ = bytes_of(fetch_);
    // A failed write is not the end: the server may have refused early, and its answer says why.
    asio::async_write(stream_, asio::buffer(out_),
                      [self = shared_from_this()](error_code, std::size_t) { self->out_ = {}; });
    read_answer();
  }

  void read_answer() {
    parser_.emplace();
    parser_->header_limit(kAnswerHeaderBytesMax);
    parser_->body_limit(fetch_.body_bytes_max);
    parser_->skip(fetch_.method == "HEAD");
    http::async_read(stream_, buffer_, *parser_, [self = shared_from_this()](error_code failed, std::size_t) {
      self->on_answer(failed);
    });
  }

  void on_answer(error_code failed) {
    if (!done_) {
      return;
    }
    if (failed) {
      finish(fail(answer_error(failed)));
      return;
    }
    auto& message = parser_->get();
    if (message.result_int() < 200 && message.result_int() != 101) {
      if (++interim_answers_ > kInterimAnswersMax) {
        finish(fail(Code::kProtocol, "{} sends no final answer, only 1xx", fetch_.to.to_string()));
        return;
      }
      read_answer();
      return;
    }
    HttpResponse response;
    response.status = static_cast<int>(message.result_int());
    response.content_type.clear();
    for (const auto& field : message) {
      std::string name(field.name_string());
      for (char& c : name) {
        c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
      }
      std::string value(field.value());
      if (name == "content-type") {
        response.content_type = value;
      }
      response.headers.emplace_back(std::move(name), std::move(value));
    }
    response.body = std::move(message.body());
    finish(std::move(response));
  }

  Error answer_error(error_code failed) const {
    const std::string to = fetch_.to.to_string();
    if (failed == http::error::body_limit) {
      return {Code::kProtocol,
              fmt::format("the answer of {} is larger than {} bytes", to, fetch_.body_bytes_max)};
    }
    if (failed == http::error::end_of_stream || failed == http::error::partial_message ||
        failed.category() != http::make_error_code(http::error::bad_method).category()) {
      return {Code::kUnavailable, fmt::format("{} closed the connection before its answer was complete: {}",
                                              to, failed.message())};
    }
    return {Code::kProtocol, fmt::format("{} does not answer with HTTP: {}", to, failed.message())};
  }

  void finish_later(Error error) {
    asio::post(io_, [self = shared_from_this(), error = std::move(error)]() mutable {
      self->finish(fail(std::move(error)));
    });
  }

  void finish(Result<HttpResponse> result) {
    if (const auto done = finish_silently()) {
      done(std::move(result));
    }
  }

  std::function<void(Result<HttpResponse>)> finish_silently() {
    auto done = std::exchange(done_, nullptr);
    timer_.cancel();
    if (const auto dial = dial_.lock()) {
      dial->cancel();
    }
    close_stream(stream_);
    return done;
  }

  asio::io_context& io_;
  HttpFetch fetch_;
  std::function<void(Result<HttpResponse>)> done_;
  asio::steady_timer timer_;
  std::weak_ptr<Dial> dial_;
  Stream stream_;
  std::string out_;
  beast::flat_buffer buffer_{kAnswerHeaderBytesMax + (128 << 10)};
  std::optional<http::response_parser<http::string_body>> parser_;
  int interim_answers_ = 0;
};

}  // namespace

std::shared_ptr<Pending> http_fetch(asio::io_context& io, HttpFetch fetch,
                                    std::function<void(Result<HttpResponse>)> done) {
  KVF_CHECK(done != nullptr);
  const auto operation = std::make_shared<FetchOperation>(io, std::move(fetch), std::move(done));
  operation->start();
  return std::make_shared<Pending>(operation);
}

}  // namespace kvferry
