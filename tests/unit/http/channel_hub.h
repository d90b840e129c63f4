#pragma once
// For the channel tests: recorded channel ends, a server with an upgrade path, and a client's frames by hand.

#include <catch2/catch.hpp>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/control/channel.h"
#include "common/http/server.h"
#include "tests/unit/http/raw_peer.h"

namespace kvferry::http_test {

using std::chrono::milliseconds;

/// One end of a channel and everything that happened to it.
struct End {
  void start(std::shared_ptr<Channel> opened) {
    channel = std::move(opened);
    channel->start([this](std::string_view bytes) { on_message(bytes); },
                   [this](const Error& error) { closed.push_back(error); });
  }
  void on_message(std::string_view bytes) {
    CHECK(closed.empty());
    messages.emplace_back(bytes);
    if (echo) {
      CHECK(channel->send(std::string(bytes)));
    }
  }

  std::shared_ptr<Channel> channel;
  std::vector<std::string> messages;
  std::vector<Error> closed;
  bool echo = false;
};

/// A server with an upgrade path, whose accepted channels wait in `accepted`.
struct Hub {
  explicit Hub(ChannelLimits limits = {}, HttpLimits http = {})
      : server(io, http, [this](const HttpRequest&) {
          ++plain;
          return http_error(404, "plain");
        }) {
    server.on_upgrade(
        "/channel",
        [this](const HttpRequest& request) -> std::optional<HttpResponse> {
          asked.push_back(request);
          return refusal;
        },
        [this](const HttpRequest&, std::shared_ptr<Channel> channel) {
          accepted.push_back(std::move(channel));
        },
        limits);
    const auto bound = server.listen(kAnyPort);
    REQUIRE(bound);
    at = *bound;
  }

  Result<std::shared_ptr<Channel>> connect(ChannelLimits limits = {},
                                           const std::string& target = "/channel") {
    std::optional<Result<std::shared_ptr<Channel>>> result;
    int calls = 0;
    connect_channel(
        io, at, target, {{"X-Epoch", "17"}}, milliseconds(5000),
        [&](Result<std::shared_ptr<Channel>> opened) {
          ++calls;
          result = std::move(opened);
        },
        limits);
    CHECK(calls == 0);
    REQUIRE(run_until(io, [&] { return calls > 0; }));
    CHECK(calls == 1);
    return *result;
  }
  /// Both ends, the server's one not started.
  std::pair<std::shared_ptr<Channel>, std::shared_ptr<Channel>> pair(ChannelLimits limits = {}) {
    auto mine = connect(limits);
    REQUIRE(mine);
    REQUIRE(run_until(io, [&] { return !accepted.empty(); }));
    auto theirs = std::move(accepted.back());
    accepted.pop_back();
    return {*mine, theirs};
  }

  boost::asio::io_context io;
  int plain = 0;
  std::vector<HttpRequest> asked;
  std::optional<HttpResponse> refusal;
  std::vector<std::shared_ptr<Channel>> accepted;
  HttpServer server;
  HostPort at;
};

inline const std::string kUpgrade =
    "GET /channel HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";

/// A client's frame: masked with zeros, so the payload stands as it is.
inline std::string frame(int opcode, const std::string& payload, bool masked = true) {
  std::string out;
  out.push_back(static_cast<char>(0x80 | opcode));
  const char mask_bit = masked ? '\x80' : '\0';
  if (payload.size() < 126) {
    out.push_back(static_cast<char>(static_cast<unsigned char>(mask_bit) | payload.size()));
  } else {
    out.push_back(static_cast<char>(mask_bit | 127));
    for (int shift = 56; shift >= 0; shift -= 8) {
      out.push_back(static_cast<char>(payload.size() >> shift & 0xff));
    }
  }
  return out + (masked ? std::string(4, '\0') : std::string()) + payload;
}

}  // namespace kvferry::http_test
