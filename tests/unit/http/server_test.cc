#include "common/http/server.h"

#include <catch2/catch.hpp>
#include <stdexcept>
#include <vector>

#include "tests/unit/http/raw_peer.h"

namespace kvferry {
namespace {

using namespace http_test;

/// A server that records its requests and answers with what it got.
struct EchoServer {
  explicit EchoServer(HttpLimits limits = {}, const HostPort& address = kAnyPort)
      : server(io, limits, [this](const HttpRequest& request) { return answer(request); }) {
    const auto bound = server.listen(address);
    REQUIRE(bound);
    REQUIRE(bound->port != 0);
    at = *bound;
  }

  HttpResponse answer(const HttpRequest& request) {
    requests.push_back(request);
    if (request.path == "/throw") {
      throw std::runtime_error("as libraries do");
    }
    if (request.path == "/none") {
      return HttpResponse{.status = 204, .content_type = "", .body = "", .headers = {}};
    }
    return HttpResponse{.status = 200,
                        .content_type = "text/plain",
                        .body = "[" + request.method + " " + request.path + " " + request.body + "]",
                        .headers = {{"x-good", "1"}, {"x-bad", "a\r\nx-forged: 1"}, {"x bad", "2"}}};
  }

  /// What comes back for `bytes` until the server closes.
  std::string exchange(const std::string& bytes) {
    RawPeer peer(io, at);
    peer.send(bytes);
    REQUIRE(run_until(io, [&] { return peer.ended(); }));
    return peer.received();
  }

  boost::asio::io_context io;
  std::vector<HttpRequest> requests;
  HttpServer server;
  HostPort at;
};

const std::string kPost =
    "POST /p%61th?room=7 HTTP/1.1\r\nHost: x\r\nX-Two: a\r\nx-two: b\r\nContent-Length: 5\r\n"
    "Connection: close\r\n\r\nhello";

bool starts_with(const std::string& text, std::string_view head) {
  return text.substr(0, head.size()) == head;
}

std::string body_of(const std::string& response) {
  const auto end = response.find("\r\n\r\n");
  return end == std::string::npos ? std::string() : response.substr(end + 4);
}

}  // namespace

TEST_CASE("a request arrives decoded, with lower-case headers and its body") {
  EchoServer echo;
  const std::string response = echo.exchange(kPost);
  CHECK(starts_with(response, "HTTP/1.1 200 OK\r\n"));
  CHECK(body_of(response) == "[POST /path hello]");
  CHECK(response.find("x-good: 1") != std::string::npos);
  REQUIRE(echo.requests.size() == 1);
  const HttpRequest& request = echo.requests[0];
  CHECK(request.target == "/p%61th?room=7");
  CHECK(request.query.at("room") == "7");
  CHECK(request.headers.at("x-two") == "a, b");
  CHECK(request.headers.at("host") == "x");
  CHECK(request.remote.find("127.0.0.1:") == 0);
}

TEST_CASE("header values of a handler cannot forge headers") {
  EchoServer echo;
  const std::string response = echo.exchange(kPost);
  CHECK(response.find("forged") == std::string::npos);
  CHECK(response.find("x bad") == std::string::npos);
}

TEST_CASE("a request may be cut between any two of its bytes") {
  EchoServer echo;
  for (std::size_t cut = 1; cut < kPost.size(); ++cut) {
    INFO("cut after byte " << cut);
    RawPeer peer(echo.io, echo.at);
    peer.send_now(std::string_view(kPost).substr(0, cut));
    // The server takes the first part (or at least had every chance to) before the rest exists.
    while (echo.io.poll() > 0) {
    }
    peer.send_now(std::string_view(kPost).substr(cut));
    REQUIRE(run_until(echo.io, [&] { return peer.ended(); }));
    REQUIRE(body_of(peer.received()) == "[POST /path hello]");
  }
  CHECK(echo.requests.size() == kPost.size() - 1);
}

TEST_CASE("a request may arrive one byte at a time") {
  EchoServer echo;
  RawPeer peer(echo.io, echo.at);
  for (const char c : kPost) {
    peer.send_now(std::string_view(&c, 1));
    while (echo.io.poll() > 0) {
    }
  }
  REQUIRE(run_until(echo.io, [&] { return peer.ended(); }));
  CHECK(body_of(peer.received()) == "[POST /path hello]");
}

TEST_CASE("pipelined requests are answered in order on one connection") {
  EchoServer echo;
  std::string all;
  for (int i = 0; i < 50; ++i) {
    all += "GET /" + std::to_string(i) + " HTTP/1.1\r\n\r\n";
  }
  const std::string response = echo.exchange(all + kPost);
  REQUIRE(echo.requests.size() == 51);
  std::size_t at = 0;
  for (int i = 0; i < 50; ++i) {
    at = response.find("[GET /" + std::to_string(i) + " ]", at);
    REQUIRE(at != std::string::npos);
  }
  CHECK(response.find("[POST /path hello]", at) != std::string::npos);
  CHECK(echo.server.stats().accepted == 1);
  CHECK(echo.server.stats().requests == 51);
}

TEST_CASE("a connection stays open between requests unless one side says close") {
  EchoServer echo;
  RawPeer peer(echo.io, echo.at);
  for (std::size_t i = 1; i <= 3; ++i) {
    peer.send("GET /a HTTP/1.1\r\n\r\n");
    REQUIRE(run_until(echo.io, [&] { return peer.count("[GET /a ]") == i; }));
  }
  CHECK_FALSE(peer.ended());
  CHECK(echo.server.connections() == 1);
  peer.send("GET /b HTTP/1.0\r\n\r\n");
  REQUIRE(run_until(echo.io, [&] { return peer.ended(); }));
  CHECK(peer.has("[GET /b ]"));
  CHECK(peer.has("Connection: close"));
  peer.close();
  REQUIRE(run_until(echo.io, [&] { return echo.server.connections() == 0; }));
}

TEST_CASE("HEAD gets the headers of GET and no body") {
  EchoServer echo;
  const std::string response = echo.exchange("HEAD /a HTTP/1.1\r\nConnection: close\r\n\r\n");
  CHECK(response.find("Content-Length: 10\r\n") != std::string::npos);
  CHECK(body_of(response).empty());
  CHECK(echo.requests.at(0).method == "HEAD");
}

TEST_CASE("a response without content carries no length") {
  EchoServer echo;
  const std::string response = echo.exchange("GET /none HTTP/1.1\r\nConnection: close\r\n\r\n");
  CHECK(starts_with(response, "HTTP/1.1 204 "));
  CHECK(response.find("Content-Length") == std::string::npos);
}

TEST_CASE("a chunked body arrives whole") {
  EchoServer echo;
  echo.exchange(
      "PUT /c HTTP/1.1\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
      "3\r\nabc\r\n4;ext=1\r\ndefg\r\n0\r\nTrailer: x\r\n\r\n");
  REQUIRE(echo.requests.size() == 1);
  CHECK(echo.requests[0].body == "abcdefg");
}

TEST_CASE("a client that waits for 100 Continue is told to go on") {
  EchoServer echo;
  RawPeer peer(echo.io, echo.at);
  peer.send("POST /e HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\nConnection: close\r\n\r\n");
  REQUIRE(run_until(echo.io, [&] { return peer.has("HTTP/1.1 100 Continue\r\n\r\n"); }));
  peer.send("ok");
  REQUIRE(run_until(echo.io, [&] { return peer.ended(); }));
  CHECK(peer.has("[POST /e ok]"));
}

TEST_CASE("a handler that throws costs one 500 and nothing else") {
  EchoServer echo;
  const std::string response = echo.exchange("GET /throw HTTP/1.1\r\n\r\n" + kPost);
  CHECK(starts_with(response, "HTTP/1.1 500 "));
  CHECK(response.find("[POST /path hello]") != std::string::npos);
}

TEST_CASE("the server listens on IPv6 and on several addresses at once") {
  EchoServer echo({}, HostPort{.host = "::1", .port = 0});
  const auto second = echo.server.listen(kAnyPort);
  REQUIRE(second);
  CHECK(echo.at.host == "::1");
  CHECK(body_of(echo.exchange(kPost)) == "[POST /path hello]");
  CHECK(echo.requests.at(0).remote.find("[::1]:") == 0);
  echo.at = *second;
  CHECK(body_of(echo.exchange(kPost)) == "[POST /path hello]");
  const auto named = echo.server.listen(HostPort{.host = "localhost", .port = 0});
  REQUIRE(named);
  echo.at = *named;
  CHECK(body_of(echo.exchange(kPost)) == "[POST /path hello]");
}

TEST_CASE("an address that is taken or does not exist is refused with its name") {
  EchoServer echo;
  const auto taken = echo.server.listen(echo.at);
  REQUIRE_FALSE(taken);
  CHECK(taken.error().code == Code::kIo);
  CHECK(taken.error().message.find(echo.at.to_string()) != std::string::npos);
  const auto foreign = echo.server.listen(HostPort{.host = "192.0.2.1", .port = 0});
  CHECK_FALSE(foreign);
  CHECK(body_of(echo.exchange(kPost)) == "[POST /path hello]");
}

TEST_CASE("after stop no connection is left and none is accepted") {
  EchoServer echo;
  RawPeer idle(echo.io, echo.at);
  RawPeer half(echo.io, echo.at);
  half.send("GET /a HT");
  REQUIRE(run_until(echo.io, [&] { return echo.server.connections() == 2; }));
  echo.server.stop();
  REQUIRE(run_until(echo.io, [&] { return idle.ended() && half.ended(); }));
  CHECK(echo.server.connections() == 0);
  CHECK_THROWS(RawPeer(echo.io, echo.at));
  CHECK(echo.requests.empty());
}

TEST_CASE("a handler may stop the server and its answer is still delivered") {
  boost::asio::io_context io;
  std::unique_ptr<HttpServer> server;
  server = std::make_unique<HttpServer>(io, HttpLimits{}, [&](const HttpRequest&) {
    server.reset();
    return HttpResponse{.status = 200, .content_type = "text/plain", .body = "bye", .headers = {}};
  });
  const auto at = server->listen(kAnyPort);
  REQUIRE(at);
  RawPeer peer(io, *at);
  peer.send("GET / HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\n\r\n");
  REQUIRE(run_until(io, [&] { return peer.ended(); }));
  CHECK(peer.count("bye") == 1);
}

TEST_CASE("an io_context may be destroyed with connections in every phase") {
  std::size_t calls = 0;
  {
    boost::asio::io_context io;
    HttpServer server(io, {}, [&](const HttpRequest&) {
      ++calls;
      return HttpResponse{
          .status = 200, .content_type = "", .body = std::string(8 << 20, 'x'), .headers = {}};
    });
    const auto at = server.listen(kAnyPort);
    REQUIRE(at);
    RawPeer idle(io, *at);
    RawPeer half(io, *at);
    half.send("GET /a HT");
    Tcp::socket deaf(io);
    deaf.connect(Tcp::endpoint(boost::asio::ip::make_address(at->host), at->port));
    boost::asio::write(deaf, boost::asio::buffer(std::string_view("GET / HTTP/1.1\r\n\r\n")));
    REQUIRE(run_until(io, [&] { return calls == 1 && server.connections() == 3; }));
  }
  CHECK(calls == 1);
}

}  // namespace kvferry
