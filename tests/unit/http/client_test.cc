#include "common/http/client.h"

#include <catch2/catch.hpp>
#include <optional>

#include "common/http/server.h"
#include "tests/unit/http/raw_peer.h"

namespace kvferry {
namespace {

using namespace http_test;
using std::chrono::milliseconds;

/// Fetches and waits for the result; fails the test when `done` comes more than once or not at all.
Result<HttpResponse> fetch(boost::asio::io_context& io, HttpFetch request) {
  int calls = 0;
  std::optional<Result<HttpResponse>> result;
  http_fetch(io, std::move(request), [&](Result<HttpResponse> answer) {
    ++calls;
    result = std::move(answer);
  });
  CHECK(calls == 0);
  REQUIRE(run_until(io, [&] { return calls > 0; }));
  io.poll();
  CHECK(calls == 1);
  return *result;
}

/// Accepts one connection and answers with fixed bytes, whatever is asked.
struct FixedServer {
  explicit FixedServer(std::string bytes, bool close_after = true)
      : acceptor(io, Tcp::endpoint(boost::asio::ip::address_v4::loopback(), 0)) {
    at = HostPort{.host = "127.0.0.1", .port = acceptor.local_endpoint().port()};
    acceptor.async_accept([this, bytes, close_after](boost::system::error_code failed, Tcp::socket socket) {
      if (failed) {
        return;
      }
      peer.emplace(std::move(socket));
      peer->send_now(bytes);
      if (close_after) {
        peer->shutdown_send();
      }
    });
  }
  HttpFetch request(milliseconds timeout = milliseconds(10000)) const {
    HttpFetch out;
    out.to = at;
    out.timeout = timeout;
    return out;
  }

  boost::asio::io_context io;
  Tcp::acceptor acceptor;
  std::optional<RawPeer> peer;
  HostPort at;
};

HostPort closed_port(boost::asio::io_context& io) {
  const Tcp::acceptor taken(io, Tcp::endpoint(boost::asio::ip::address_v4::loopback(), 0));
  return HostPort{.host = "127.0.0.1", .port = taken.local_endpoint().port()};
}

}  // namespace

TEST_CASE("a fetch brings the request there and the answer back") {
  boost::asio::io_context io;
  HttpRequest seen;
  HttpServer server(io, {}, [&](const HttpRequest& request) {
    seen = request;
    return HttpResponse{
        .status = 418, .content_type = "text/x", .body = "answer", .headers = {{"X-Extra", "1"}}};
  });
  for (const char* host : {"127.0.0.1", "::1", "localhost"}) {
    INFO(host);
    const auto at = server.listen(HostPort{.host = host, .port = 0});
    REQUIRE(at);
    HttpFetch request;
    request.to = HostPort{.host = host, .port = at->port};
    request.method = "POST";
    request.target = "/v1/x?a=%20b";
    request.body = std::string("with\0zero", 9);
    request.headers = {{"X-Key", "secret"}};
    const auto answer = fetch(io, request);
    REQUIRE(answer);
    CHECK(answer->status == 418);
    CHECK(answer->content_type == "text/x");
    CHECK(answer->body == "answer");
    CHECK(std::find(answer->headers.begin(), answer->headers.end(),
                    std::pair<std::string, std::string>("x-extra", "1")) != answer->headers.end());
    CHECK(seen.method == "POST");
    CHECK(seen.path == "/v1/x");
    CHECK(seen.query.at("a") == " b");
    CHECK(seen.body == request.body);
    CHECK(seen.headers.at("x-key") == "secret");
    CHECK(seen.headers.at("content-type") == "application/json");
  }
}

TEST_CASE("an address with a zone is dialled, and the zone does not travel") {
  boost::asio::io_context io;
  std::string host;
  HttpServer server(io, {}, [&](const HttpRequest& request) {
    host = request.headers.at("host");
    return HttpResponse{};
  });
  const auto at = server.listen(HostPort{.host = "::1", .port = 0});
  REQUIRE(at);
  HttpFetch request;
  request.to = HostPort{.host = "::1%lo", .port = at->port};
  REQUIRE(fetch(io, request));
  CHECK(host == "[::1]:" + std::to_string(at->port));
}

TEST_CASE("HEAD brings the headers without waiting for a body") {
  boost::asio::io_context io;
  HttpServer server(io, {}, [](const HttpRequest&) {
    return HttpResponse{.status = 200, .content_type = "text/x", .body = "unsent", .headers = {}};
  });
  HttpFetch request;
  const auto at = server.listen(kAnyPort);
  REQUIRE(at);
  request.to = *at;
  request.method = "HEAD";
  const auto answer = fetch(io, request);
  REQUIRE(answer);
  CHECK(answer->content_type == "text/x");
  CHECK(answer->body.empty());
}

TEST_CASE("a refused connection and an unknown name are kUnavailable and name the target") {
  boost::asio::io_context io;
  HttpFetch request;
  request.to = closed_port(io);
  const auto refused = fetch(io, request);
  REQUIRE_FALSE(refused);
  CHECK(refused.error().code == Code::kUnavailable);
  CHECK(refused.error().message.find(request.to.to_string()) != std::string::npos);

  request.to.host = "no-such-host.invalid";
  const auto unknown = fetch(io, request);
  REQUIRE_FALSE(unknown);
  CHECK(unknown.error().code == Code::kUnavailable);
  CHECK(unknown.error().message.find("no-such-host.invalid") != std::string::npos);
}

TEST_CASE("a listener that never answers costs the timeout and not more") {
  boost::asio::io_context io;
  Tcp::acceptor silent(io, Tcp::endpoint(boost::asio::ip::address_v4::loopback(), 0));
  HttpFetch request;
  request.to = HostPort{.host = "127.0.0.1", .port = silent.local_endpoint().port()};
  request.timeout = milliseconds(100);
  const auto begin = std::chrono::steady_clock::now();
  const auto answer = fetch(io, request);
  REQUIRE_FALSE(answer);
  CHECK(answer.error().code == Code::kDeadline);
  const auto took = std::chrono::steady_clock::now() - begin;
  CHECK(took >= milliseconds(100));
  CHECK(took < milliseconds(5000));
}

TEST_CASE("an answer that stops half way costs the timeout") {
  FixedServer server("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf", false);
  const auto answer = fetch(server.io, server.request(milliseconds(100)));
  REQUIRE_FALSE(answer);
  CHECK(answer.error().code == Code::kDeadline);
}

TEST_CASE("an answer above body_bytes_max is kProtocol, with and without a length") {
  for (const char* head : {"HTTP/1.1 200 OK\r\nContent-Length: 1001\r\n\r\n", "HTTP/1.1 200 OK\r\n\r\n"}) {
    INFO(head);
    FixedServer server(head + std::string(1001, 'x'));
    HttpFetch request = server.request();
    request.body_bytes_max = 1000;
    const auto answer = fetch(server.io, request);
    REQUIRE_FALSE(answer);
    CHECK(answer.error().code == Code::kProtocol);
    CHECK(answer.error().message.find("1000") != std::string::npos);
  }
  FixedServer server("HTTP/1.1 200 OK\r\n\r\n" + std::string(1000, 'x'));
  HttpFetch request = server.request();
  request.body_bytes_max = 1000;
  const auto answer = fetch(server.io, request);
  REQUIRE(answer);
  CHECK(answer->body.size() == 1000);
}

TEST_CASE("an answer that is not HTTP is kProtocol") {
  for (const std::string& bytes :
       {std::string("SSH-2.0-OpenSSH\r\n\r\n"), std::string("HTTP/1.1 abc\r\n\r\n"), std::string(100, '\xff'),
        "HTTP/1.1 200 OK\r\nX: " + std::string(100000, 'h') + "\r\n\r\n"}) {
    FixedServer server(bytes);
    const auto answer = fetch(server.io, server.request());
    REQUIRE_FALSE(answer);
    CHECK(answer.error().code == Code::kProtocol);
  }
}

TEST_CASE("a connection lost before the answer is complete is kUnavailable") {
  for (const std::string& bytes : {std::string(), std::string("HTTP/1.1 200 OK\r\nConte"),
                                   std::string("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")}) {
    INFO(bytes);
    FixedServer server(bytes);
    const auto answer = fetch(server.io, server.request());
    REQUIRE_FALSE(answer);
    CHECK(answer.error().code == Code::kUnavailable);
  }
}

TEST_CASE("interim answers are skipped, and endless ones are an error") {
  FixedServer once("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
  const auto answer = fetch(once.io, once.request());
  REQUIRE(answer);
  CHECK(answer->body == "ok");
  std::string many;
  for (int i = 0; i < 100; ++i) {
    many += "HTTP/1.1 103 Early Hints\r\n\r\n";
  }
  FixedServer endless(many);
  const auto none = fetch(endless.io, endless.request());
  REQUIRE_FALSE(none);
  CHECK(none.error().code == Code::kProtocol);
}

TEST_CASE("a refusal is received even while a large body is still being sent") {
  boost::asio::io_context io;
  HttpServer server(io, {}, [](const HttpRequest&) { return HttpResponse{}; });
  const auto at = server.listen(kAnyPort);
  REQUIRE(at);
  HttpFetch request;
  request.to = *at;
  request.method = "POST";
  request.body = std::string(30 << 20, 'x');
  const auto answer = fetch(io, request);
  REQUIRE(answer);
  CHECK(answer->status == 413);
}

TEST_CASE("a request that could smuggle lines is refused before anything is sent") {
  boost::asio::io_context io;
  HttpFetch good;
  good.to = closed_port(io);
  for (int which = 0; which < 6; ++which) {
    HttpFetch bad = good;
    switch (which) {
      case 0:
        bad.target = "/a\r\nX: y";
        break;
      case 1:
        bad.target = "/a b";
        break;
      case 2:
        bad.method = "GET /x";
        break;
      case 3:
        bad.headers = {{"a", "b\r\nc: d"}};
        break;
      case 4:
        bad.headers = {{"a b", "c"}};
        break;
      default:
        bad.target = "a";
        break;
    }
    INFO("case " << which);
    const auto answer = fetch(io, bad);
    REQUIRE_FALSE(answer);
    CHECK(answer.error().code == Code::kInvalid);
  }
}

TEST_CASE("a cancelled fetch reports kAborted once and an abandoned one never") {
  FixedServer server("", false);
  std::vector<Code> codes;
  const auto done = [&](const Result<HttpResponse>& answer) {
    codes.push_back(answer ? Code::kInternal : answer.error().code);
  };
  const auto handle = http_fetch(server.io, server.request(), done);
  REQUIRE(run_until(server.io, [&] { return server.peer.has_value(); }));
  handle->cancel();
  handle->cancel();
  CHECK(codes.empty());
  REQUIRE(run_until(server.io, [&] { return !codes.empty(); }));
  handle->cancel();
  http_fetch(server.io, server.request(), done)->abandon();
  HttpFetch named = server.request();
  named.to.host = "localhost";
  http_fetch(server.io, named, done)->abandon();
  server.peer.reset();
  server.io.restart();
  server.io.run_for(kLong);
  CHECK(codes == std::vector<Code>{Code::kAborted});
}

TEST_CASE("an io_context may be destroyed in the middle of a fetch") {
  bool called = false;
  auto canary = std::make_shared<int>(1);
  std::shared_ptr<Pending> handle;
  {
    FixedServer server("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf", false);
    handle = http_fetch(server.io, server.request(), [&called, canary](const auto&) { called = true; });
    http_fetch(server.io, server.request(), [&called, canary](const auto&) { called = true; });
    REQUIRE(run_until(server.io, [&] { return server.peer && server.peer->has("\r\n\r\n"); }));
    server.peer.reset();
  }
  handle->cancel();
  CHECK_FALSE(called);
  CHECK(canary.use_count() == 1);
}

}  // namespace kvferry
