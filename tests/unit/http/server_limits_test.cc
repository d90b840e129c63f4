#include <catch2/catch.hpp>
#include <deque>
#include <nlohmann/json.hpp>
#include <random>

#include "common/http/server.h"
#include "tests/unit/http/raw_peer.h"

namespace kvferry {
namespace {

using namespace http_test;
using std::chrono::milliseconds;

struct LimitedServer {
  explicit LimitedServer(HttpLimits limits)
      : server(io, limits, [this](const HttpRequest& request) {
          bodies.push_back(request.body);
          return HttpResponse{.status = 200, .content_type = "", .body = answer, .headers = {}};
        }) {
    const auto bound = server.listen(kAnyPort);
    REQUIRE(bound);
    at = *bound;
  }

  std::string exchange(const std::string& bytes, bool half_close = false) {
    RawPeer peer(io, at);
    peer.send(bytes);
    if (half_close) {
      REQUIRE(run_until(io, [&] { return server.connections() > 0; }));
      peer.shutdown_send();
    }
    REQUIRE(run_until(io, [&] { return peer.ended(); }));
    return peer.received();
  }

  boost::asio::io_context io;
  std::string answer = "fine";
  std::vector<std::string> bodies;
  HttpServer server;
  HostPort at;
};

/// The status line and a JSON body with a text under "error".
void check_refusal(const std::string& response, int status) {
  INFO(response);
  CHECK(response.substr(0, 13) == "HTTP/1.1 " + std::to_string(status) + " ");
  const auto end = response.find("\r\n\r\n");
  REQUIRE(end != std::string::npos);
  const auto body = nlohmann::json::parse(response.substr(end + 4), nullptr, false);
  REQUIRE(body.is_object());
  REQUIRE(body.contains("error"));
  CHECK_FALSE(body["error"].get<std::string>().empty());
}

HttpLimits small_limits() {
  HttpLimits limits;
  limits.body_bytes_max = 1000;
  limits.header_bytes_max = 2000;
  return limits;
}

}  // namespace

TEST_CASE("a body at the limit is taken and one byte more is refused with 413") {
  LimitedServer limited(small_limits());
  const auto post = [](std::size_t bytes) {
    return "POST / HTTP/1.1\r\nConnection: close\r\nContent-Length: " + std::to_string(bytes) + "\r\n\r\n" +
           std::string(bytes, 'b');
  };
  CHECK(limited.exchange(post(1000)).find("fine") != std::string::npos);
  check_refusal(limited.exchange(post(1001)), 413);
  check_refusal(limited.exchange(post(300000)), 413);
  REQUIRE(limited.bodies.size() == 1);
  CHECK(limited.bodies[0].size() == 1000);
  CHECK(limited.server.stats().malformed == 2);
}

TEST_CASE("a chunked body above the limit is refused with 413") {
  LimitedServer limited(small_limits());
  std::string request = "POST / HTTP/1.1\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n";
  for (int i = 0; i < 10; ++i) {
    request += "64\r\n" + std::string(100, 'c') + "\r\n";
  }
  CHECK(limited.exchange(request + "0\r\n\r\n").find("fine") != std::string::npos);
  check_refusal(limited.exchange(request + "1\r\nc\r\n0\r\n\r\n"), 413);
  check_refusal(limited.exchange("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n"),
                413);
  CHECK(limited.bodies.size() == 1);
}

TEST_CASE("headers above the limit are refused with 431") {
  LimitedServer limited(small_limits());
  const auto get = [](std::size_t bytes) {
    return "GET / HTTP/1.1\r\nConnection: close\r\nX: " + std::string(bytes, 'h') + "\r\n\r\n";
  };
  CHECK(limited.exchange(get(1500)).find("fine") != std::string::npos);
  check_refusal(limited.exchange(get(2100)), 431);
  check_refusal(limited.exchange(get(500000)), 431);
  check_refusal(limited.exchange("GET /" + std::string(5000, 'u') + " HTTP/1.1\r\n\r\n"), 431);
  // Without an end in sight it is the limit that answers, too.
  check_refusal(limited.exchange("GET / HTTP/1.1\r\nX: " + std::string(60000, 'h')), 431);
  CHECK(limited.bodies.size() == 1);
}

TEST_CASE("a chunk header without an end is refused instead of being kept") {
  LimitedServer limited(small_limits());
  check_refusal(
      limited.exchange("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;" + std::string(100000, 'e')),
      400);
  CHECK(limited.bodies.empty());
}

TEST_CASE("a bad percent sequence is refused with 400") {
  LimitedServer limited({});
  check_refusal(limited.exchange("GET /a%2 HTTP/1.1\r\n\r\n"), 400);
  check_refusal(limited.exchange("GET /?a=%xx HTTP/1.1\r\n\r\n"), 400);
  CHECK(limited.bodies.empty());
  CHECK(limited.server.stats().malformed == 2);
}

TEST_CASE("ambiguous body lengths are refused, not guessed") {
  LimitedServer limited({});
  const std::string smuggled = "GET /smuggled HTTP/1.1\r\n\r\n";
  for (const char* headers :
       {"Transfer-Encoding: gzip\r\n", "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n",
        "Content-Length: 3\r\nContent-Length: 4\r\n", "Content-Length: -1\r\n", "Content-Length: 0x3\r\n",
        "Content-Length: 99999999999999999999999\r\n"}) {
    INFO(headers);
    check_refusal(limited.exchange(std::string("POST / HTTP/1.1\r\n") + headers + "\r\n" + smuggled), 400);
  }
  CHECK(limited.bodies.empty());
}

TEST_CASE("garbage gets 400 or a closed connection, and the server lives") {
  LimitedServer limited({});
  for (const std::string& garbage :
       {std::string("garbage\r\n\r\n"), std::string("GET / HTTP/3.7\r\n\r\n"),
        std::string("\x16\x03\x01\x02\x00\x01", 6), std::string(100, '\0'),
        std::string("GET / HTTP/1.1\r\nno colon\r\n\r\n"), std::string("GET / HTTP/1.1\r\n: empty\r\n\r\n"),
        std::string("GET /\x01 HTTP/1.1\r\n\r\n"),
        std::string("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")}) {
    check_refusal(limited.exchange(garbage, true), 400);
  }
  const auto seed = std::random_device{}();
  INFO("seed " << seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 200; ++round) {
    std::string bytes = round % 2 == 0 ? "" : "POST /x?y HTTP/1.1\r\nContent-Length: 5\r\nA: b\r\n\r\nhello";
    if (bytes.empty()) {
      for (auto left = 1 + random() % 300; left > 0; --left) {
        bytes.push_back(static_cast<char>(random()));
      }
    } else {
      for (auto left = 1 + random() % 3; left > 0; --left) {
        bytes[random() % bytes.size()] = static_cast<char>(random());
      }
    }
    limited.exchange(bytes, true);
  }
  limited.bodies.clear();
  limited.exchange("POST / HTTP/1.1\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok");
  CHECK(limited.bodies == std::vector<std::string>{"ok"});
  REQUIRE(run_until(limited.io, [&] { return limited.server.connections() == 0; }));
}

TEST_CASE("a request that trickles in is cut with 408 by the request timeout") {
  HttpLimits limits;
  limits.request_timeout = milliseconds(150);
  LimitedServer limited(limits);
  for (const std::string& part : {std::string("G"), std::string("GET / HTTP/1.1\r\nHost: x\r\n"),
                                  std::string("POST / HTTP/1.1\r\nContent-Length: 10\r\n\r\nhal")}) {
    INFO(part);
    const auto begin = std::chrono::steady_clock::now();
    const std::string response = limited.exchange(part);
    check_refusal(response, 408);
    CHECK(std::chrono::steady_clock::now() - begin >= milliseconds(140));
  }
  CHECK(limited.server.stats().timeouts == 3);
  CHECK(limited.bodies.empty());
}

TEST_CASE("steady bytes do not buy a slow request more time") {
  // Method: one more byte of header or body at every turn of the loop, so that there always is one to read.
  HttpLimits limits;
  limits.request_timeout = milliseconds(100);
  limits.header_bytes_max = 8 << 20;
  limits.body_bytes_max = 8 << 20;
  LimitedServer limited(limits);
  for (const char* begin : {"GET / HTTP/1.1\r\nX: ", "POST / HTTP/1.1\r\nContent-Length: 8000000\r\n\r\n"}) {
    RawPeer peer(limited.io, limited.at);
    peer.send(begin);
    const auto trickle = [&] {
      if (!peer.has("\r\n\r\n")) {
        peer.send("y");
      }
      return peer.has("\r\n\r\n");
    };
    REQUIRE(run_until(limited.io, trickle));
    check_refusal(peer.received(), 408);
  }
  CHECK(limited.server.stats().timeouts == 2);
}

TEST_CASE("an idle connection is closed without a word after the idle timeout") {
  HttpLimits limits;
  limits.idle_timeout = milliseconds(50);
  LimitedServer limited(limits);
  CHECK(limited.exchange("").empty());
  const std::string response = limited.exchange("GET / HTTP/1.1\r\n\r\n");
  CHECK(response.find("fine") != std::string::npos);
  CHECK(response.find("408") == std::string::npos);
  CHECK(limited.server.stats().timeouts == 0);
}

TEST_CASE("a client that does not take its answer is cut by the request timeout") {
  HttpLimits limits;
  limits.request_timeout = milliseconds(100);
  LimitedServer limited(limits);
  limited.answer = std::string(32 << 20, 'x');
  Tcp::socket deaf(limited.io);
  deaf.connect(Tcp::endpoint(boost::asio::ip::make_address(limited.at.host), limited.at.port));
  boost::asio::write(deaf, boost::asio::buffer(std::string_view("GET / HTTP/1.1\r\n\r\n")));
  REQUIRE(run_until(limited.io, [&] { return limited.server.stats().timeouts == 1; }));
  CHECK(limited.server.connections() == 0);
}

TEST_CASE("connections above connections_max get 503, and room that is freed is used again") {
  HttpLimits limits;
  limits.connections_max = 3;
  LimitedServer limited(limits);
  std::deque<RawPeer> held;
  for (std::size_t i = 0; i < 3; ++i) {
    held.emplace_back(limited.io, limited.at);
    REQUIRE(run_until(limited.io, [&] { return limited.server.connections() == i + 1; }));
  }
  check_refusal(limited.exchange("GET / HTTP/1.1\r\n\r\n"), 503);
  check_refusal(limited.exchange(""), 503);
  CHECK(limited.server.stats().refused == 2);
  CHECK(limited.server.stats().accepted == 3);
  CHECK(limited.bodies.empty());

  held.pop_front();
  REQUIRE(run_until(limited.io, [&] { return limited.server.connections() == 2; }));
  CHECK(limited.exchange("GET / HTTP/1.1\r\nConnection: close\r\n\r\n").find("fine") != std::string::npos);
  held.back().send("GET / HTTP/1.1\r\n\r\n");
  CHECK(run_until(limited.io, [&] { return held.back().has("fine"); }));
}

TEST_CASE("a flood of connections is cut down to the limit and the server goes on") {
  HttpLimits limits;
  limits.connections_max = 2;
  LimitedServer limited(limits);
  {
    std::deque<RawPeer> flood;
    for (int i = 0; i < 300; ++i) {
      flood.emplace_back(limited.io, limited.at);
      limited.io.poll();
    }
    REQUIRE(run_until(limited.io, [&] { return limited.server.stats().refused == 298; }));
    CHECK(limited.server.connections() == 2);
  }
  REQUIRE(run_until(limited.io, [&] { return limited.server.connections() == 0; }));
  CHECK(limited.exchange("GET / HTTP/1.1\r\nConnection: close\r\n\r\n").find("fine") != std::string::npos);
}

}  // namespace kvferry
