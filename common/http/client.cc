#include "common/http/client.h"

#include <fmt/format.h>

#include <boost/asio/write.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/error.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/read.hpp>
#include <boost/beast/http/string_body.hpp>
#include <optional>

#include "common/base/check.h"
#include "common/http/call.h"

namespace kvferry {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using boost::system::error_code;

namespace {

constexpr std::uint32_t kAnswerHeaderBytesMax = 64 << 10;
constexpr int kInterimAnswersMax = 8;  // 1xx answers before the real one

std::string bytes_of(const HttpFetch& fetch) {
  std::string out = fmt::format("{} {} HTTP/1.1\r\nHost: {}\r\nUser-Agent: kvferry\r\nConnection: close\r\n",
                                fetch.method, fetch.target, host_header(fetch.to));
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

class FetchCall final : public Call<HttpResponse> {
 public:
  FetchCall(asio::io_context& io, HttpFetch fetch, Done done)
      : Call(io, fetch.to, fmt::format("{} {}{}", fetch.method, fetch.to.to_string(), fetch.target),
             std::move(done)),
        fetch_(std::move(fetch)),
        stream_(io) {}

 private:
  void on_connected(Stream stream) override {
    stream_ = std::move(stream);
    out_ = bytes_of(fetch_);
    // A failed write is not the end: the server may have refused early, and its answer says why.
    asio::async_write(stream_, asio::buffer(out_),
                      [this, self = shared_from_this()](error_code, std::size_t) { out_ = {}; });
    read_answer();
  }

  void read_answer() {
    parser_.emplace();
    parser_->header_limit(kAnswerHeaderBytesMax);
    parser_->body_limit(fetch_.body_bytes_max);
    parser_->skip(fetch_.method == "HEAD");
    http::async_read(
        stream_, buffer_, *parser_,
        [this, self = shared_from_this()](error_code failed, std::size_t) { on_answer(failed); });
  }

  void on_answer(error_code failed) {
    if (finished()) {
      return;
    }
    if (failed) {
      finish(fail(answer_error(failed)));
      return;
    }
    auto& message = parser_->get();
    if (message.result_int() < 200 && message.result_int() != 101) {
      if (++interim_answers_ > kInterimAnswersMax) {
        finish(fail(Code::kProtocol, "{} sends no final answer, only 1xx", to().to_string()));
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
    const std::string peer = to().to_string();
    if (failed == http::error::body_limit) {
      return {Code::kProtocol,
              fmt::format("the answer of {} is larger than {} bytes", peer, fetch_.body_bytes_max)};
    }
    if (failed == http::error::end_of_stream || failed == http::error::partial_message ||
        failed.category() != http::make_error_code(http::error::bad_method).category()) {
      return {Code::kUnavailable, fmt::format("{} closed the connection before its answer was complete: {}",
                                              peer, failed.message())};
    }
    return {Code::kProtocol, fmt::format("{} does not answer with HTTP: {}", peer, failed.message())};
  }

  void release() override { close_stream(stream_); }

  HttpFetch fetch_;
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
  auto sendable = check_sendable(fetch.method, fetch.target, fetch.headers);
  if (sendable && !is_header_value(fetch.content_type)) {
    sendable = fail(Code::kInvalid, "content type cannot be sent");
  }
  const auto timeout = fetch.timeout;
  const auto call = std::make_shared<FetchCall>(io, std::move(fetch), std::move(done));
  call->start(timeout, std::move(sendable));
  return std::make_shared<Pending>(call);
}

}  // namespace kvferry
