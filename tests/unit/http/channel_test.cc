#include "common/control/channel.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <random>

#include "common/http/server.h"
#include "tests/unit/http/raw_peer.h"

namespace kvferry {
namespace {

using namespace http_test;
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

const std::string kUpgrade =
    "GET /channel HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";

/// A client's frame: masked with zeros, so the payload stands as it is.
std::string frame(int opcode, const std::string& payload, bool masked = true) {
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

}  // namespace

TEST_CASE("an admitted upgrade becomes a channel on both sides") {
  Hub hub;
  auto [mine, theirs] = hub.pair();
  REQUIRE(hub.asked.size() == 1);
  CHECK(hub.asked[0].path == "/channel");
  CHECK(hub.asked[0].headers.at("x-epoch") == "17");
  CHECK(mine->remote() == hub.at.to_string());
  CHECK(theirs->remote() == hub.asked[0].remote);
  CHECK(hub.server.connections() == 1);
  CHECK(hub.plain == 0);
}

TEST_CASE("a refused upgrade carries its status and reason to the client") {
  Hub hub;
  for (const auto& [status, code] : {std::pair(401, Code::kUnauthorized), std::pair(403, Code::kUnauthorized),
                                     std::pair(404, Code::kNotFound), std::pair(409, Code::kConflict),
                                     std::pair(422, Code::kMismatch), std::pair(429, Code::kExhausted),
                                     std::pair(503, Code::kUnavailable), std::pair(400, Code::kProtocol)}) {
    hub.refusal = http_error(status, "because of the moon");
    const auto refused = hub.connect();
    REQUIRE_FALSE(refused);
    CHECK(refused.error().code == code);
    CHECK(refused.error().message.find("because of the moon") != std::string::npos);
  }
  CHECK(hub.accepted.empty());
  CHECK(hub.plain == 0);
}

TEST_CASE("an upgrade of another path and a plain request go to the handler") {
  Hub hub;
  const auto other = hub.connect({}, "/other");
  REQUIRE_FALSE(other);
  CHECK(other.error().code == Code::kNotFound);
  RawPeer plain(hub.io, hub.at);
  plain.send("GET /channel HTTP/1.1\r\nConnection: close\r\n\r\n");
  REQUIRE(run_until(hub.io, [&] { return plain.ended(); }));
  CHECK(plain.has("HTTP/1.1 404"));
  CHECK(hub.plain == 2);
  CHECK(hub.asked.empty());
}

TEST_CASE("messages of every size come back in order") {
  const auto seed = std::random_device{}();
  INFO("seed " << seed);
  std::mt19937 random(seed);
  Hub hub;
  auto [mine, theirs] = hub.pair();
  End client;
  End server;
  server.echo = true;
  client.start(mine);
  server.start(theirs);
  for (const std::size_t count : {1u, 2u, 30u, 1000u}) {
    client.messages.clear();
    std::vector<std::string> sent;
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t size_max = i % 50 == 0 ? 700000 : 3000;
      std::string message(random() % size_max, static_cast<char>(random()));
      if (!message.empty()) {
        message[random() % message.size()] = static_cast<char>(i);
      }
      sent.push_back(message);
      REQUIRE(client.channel->send(std::move(message)));
    }
    REQUIRE(run_until(hub.io, [&] { return client.messages.size() >= count; }));
    CHECK((client.messages == sent));
    CHECK(client.channel->queued_bytes() == 0);
  }
  CHECK(client.closed.empty());
}

TEST_CASE("both sides may send at the same time without blocking each other") {
  Hub hub;
  auto [mine, theirs] = hub.pair();
  End client;
  End server;
  client.start(mine);
  server.start(theirs);
  for (int i = 0; i < 50; ++i) {
    REQUIRE(client.channel->send(std::string(1 << 20, 'c')));
    REQUIRE(server.channel->send(std::string(1 << 20, 's')));
  }
  REQUIRE(run_until(hub.io, [&] { return client.messages.size() == 50 && server.messages.size() == 50; }));
}

TEST_CASE("messages that arrive before start are not lost") {
  Hub hub;
  auto [mine, theirs] = hub.pair();
  End client;
  client.start(mine);
  REQUIRE(client.channel->send("first"));
  REQUIRE(client.channel->send("second"));
  REQUIRE(run_until(hub.io, [&] { return client.channel->queued_bytes() == 0; }));
  hub.io.poll();
  End server;
  server.start(theirs);
  CHECK(server.messages.empty());
  REQUIRE(run_until(hub.io, [&] { return server.messages.size() == 2; }));
  CHECK(server.messages == std::vector<std::string>{"first", "second"});
}

TEST_CASE("a full queue refuses with kExhausted, keeps what it took, and takes more later") {
  ChannelLimits limits;
  limits.queue_bytes_max = 10 << 20;
  Hub hub;
  auto [mine, theirs] = hub.pair(limits);
  End client;
  client.start(mine);
  std::size_t taken = 0;
  Result<void> last;
  // The server's end is not started, so once the connection's buffers are full nothing leaves.
  for (; taken < 100 && last; taken += last ? 1 : 0) {
    last = client.channel->send(std::string(1 << 20, static_cast<char>(taken)));
  }
  REQUIRE_FALSE(last);
  CHECK(last.error().code == Code::kExhausted);
  CHECK(last.error().message.find("queue_bytes_max") != std::string::npos);
  CHECK(taken == 9);
  CHECK(client.channel->queued_bytes() <= limits.queue_bytes_max);
  End server;
  server.start(theirs);
  REQUIRE(run_until(hub.io, [&] { return server.messages.size() == taken; }));
  for (std::size_t i = 0; i < taken; ++i) {
    CHECK(server.messages[i][0] == static_cast<char>(i));
  }
  REQUIRE(run_until(hub.io, [&] { return client.channel->queued_bytes() == 0; }));
  CHECK(client.channel->send("more"));
}

TEST_CASE("empty messages count against the queue too") {
  ChannelLimits limits;
  limits.queue_bytes_max = 1000;
  Hub hub;
  auto [mine, theirs] = hub.pair(limits);
  int taken = 0;
  while (taken < 1000 && mine->send("")) {
    ++taken;
  }
  CHECK(taken > 0);
  CHECK(taken < 1000);
}

TEST_CASE("a message above message_bytes_max is refused by the sender and ends the receiver") {
  ChannelLimits small;
  small.message_bytes_max = 1000;
  Hub hub(small);
  auto [mine, theirs] = hub.pair();
  const auto refused = theirs->send(std::string(1001, 'x'));
  REQUIRE_FALSE(refused);
  CHECK(refused.error().code == Code::kInvalid);
  CHECK(theirs->send(std::string(1000, 'x')));

  End client;
  End server;
  client.start(mine);
  server.start(theirs);
  REQUIRE(client.channel->send(std::string(1000, 'a')));
  REQUIRE(client.channel->send(std::string(1001, 'b')));
  REQUIRE(run_until(hub.io, [&] { return !server.closed.empty() && !client.closed.empty(); }));
  CHECK(server.messages.size() == 1);
  CHECK(server.closed[0].code == Code::kProtocol);
  CHECK(client.closed[0].code == Code::kPeerLost);
}

TEST_CASE("close delivers what was queued, then the reason, and ends both sides once") {
  Hub hub;
  auto [mine, theirs] = hub.pair();
  End client;
  End server;
  client.start(mine);
  server.start(theirs);
  for (int i = 0; i < 20; ++i) {
    REQUIRE(client.channel->send(std::string(300000, static_cast<char>(i))));
  }
  client.channel->close("going home\n\xff");
  client.channel->close("twice");
  CHECK(client.closed.empty());
  const auto late = client.channel->send("late");
  REQUIRE_FALSE(late);
  CHECK(late.error().code == Code::kUnavailable);
  REQUIRE(run_until(hub.io, [&] { return !client.closed.empty() && !server.closed.empty(); }));
  hub.io.poll();
  CHECK(server.messages.size() == 20);
  REQUIRE(client.closed.size() == 1);
  CHECK(client.closed[0].code == Code::kAborted);
  CHECK(client.closed[0].message == "going home\n\xff");
  REQUIRE(server.closed.size() == 1);
  CHECK(server.closed[0].code == Code::kPeerLost);
  CHECK(server.closed[0].message.find("going home??") != std::string::npos);
  REQUIRE(run_until(hub.io, [&] { return hub.server.connections() == 0; }));
}

TEST_CASE("a channel may be closed by both sides, from inside a message, and before start") {
  Hub hub;
  {
    auto [mine, theirs] = hub.pair();
    End client;
    End server;
    client.start(mine);
    server.start(theirs);
    client.channel->close("a");
    server.channel->close("b");
    REQUIRE(run_until(hub.io, [&] { return !client.closed.empty() && !server.closed.empty(); }));
  }
  {
    auto [mine, theirs] = hub.pair();
    std::vector<Error> ended;
    End client;
    client.start(mine);
    theirs->start([&, their = theirs.get()](std::string_view) { their->close("from inside"); },
                  [&](const Error& error) { ended.push_back(error); });
    REQUIRE(client.channel->send("1"));
    REQUIRE(client.channel->send("2"));
    REQUIRE(run_until(hub.io, [&] { return !client.closed.empty() && !ended.empty(); }));
    CHECK(client.closed[0].message.find("from inside") != std::string::npos);
  }
  {
    auto [mine, theirs] = hub.pair();
    End client;
    client.start(mine);
    theirs->close("unwanted");
    REQUIRE(run_until(hub.io, [&] { return !client.closed.empty() && hub.server.connections() == 0; }));
    End late;
    late.start(theirs);
    CHECK(late.closed.empty());
    REQUIRE(run_until(hub.io, [&] { return !late.closed.empty(); }));
    CHECK(late.closed[0] == Error{Code::kAborted, "unwanted"});
  }
}

TEST_CASE("close gives up on a peer that takes nothing after close_timeout") {
  ChannelLimits limits;
  limits.close_timeout = milliseconds(100);
  Hub hub(limits);
  RawPeer deaf(hub.io, hub.at);
  deaf.send(kUpgrade);
  REQUIRE(run_until(hub.io, [&] { return !hub.accepted.empty(); }));
  End server;
  server.start(hub.accepted[0]);
  server.channel->close("bye");
  REQUIRE(run_until(hub.io, [&] { return !server.closed.empty(); }));
  CHECK(server.closed[0] == Error{Code::kAborted, "bye"});
  CHECK(deaf.has("bye"));
}

TEST_CASE("a peer that vanishes gives kPeerLost once, also with messages queued") {
  for (const bool hard : {false, true}) {
    for (const bool loaded : {false, true}) {
      INFO("reset " << hard << ", queue " << loaded);
      Hub hub;
      RawPeer peer(hub.io, hub.at);
      peer.send(kUpgrade);
      REQUIRE(run_until(hub.io, [&] { return !hub.accepted.empty(); }));
      End server;
      server.start(hub.accepted[0]);
      for (int i = 0; loaded && i < 10; ++i) {
        REQUIRE(server.channel->send(std::string(4 << 20, 'x')));
      }
      hub.io.poll();
      hard ? peer.reset() : peer.close();
      REQUIRE(run_until(hub.io, [&] { return !server.closed.empty(); }));
      hub.io.restart();
      hub.io.poll();
      REQUIRE(server.closed.size() == 1);
      CHECK(server.closed[0].code == Code::kPeerLost);
      CHECK_FALSE(server.channel->is_open());
      CHECK(server.channel->send("x").error().code == Code::kUnavailable);
      CHECK(hub.server.connections() == 0);
    }
  }
}

TEST_CASE("text messages, unmasked frames and garbage end a channel with kProtocol") {
  for (const std::string& bytes : {frame(1, "text"), frame(2, "unmasked", false), frame(3, "reserved opcode"),
                                   std::string(200, '\xff'), frame(2, std::string(5 << 20, 'x')),
                                   std::string("\x82\xff\x7f\xff\xff\xff\xff\xff\xff\xff----", 14)}) {
    Hub hub;
    RawPeer peer(hub.io, hub.at);
    peer.send(kUpgrade);
    REQUIRE(run_until(hub.io, [&] { return !hub.accepted.empty(); }));
    End server;
    server.start(hub.accepted[0]);
    peer.send(frame(2, "good") + bytes);
    REQUIRE(run_until(hub.io, [&] { return !server.closed.empty(); }));
    INFO("bytes begin with " << static_cast<int>(bytes[0]) << " " << server.closed[0].message);
    CHECK(server.messages == std::vector<std::string>{"good"});
    CHECK(server.closed.size() == 1);
    CHECK(server.closed[0].code == Code::kProtocol);
  }
}

TEST_CASE("random bytes after the upgrade never do more than end the channel") {
  const auto seed = std::random_device{}();
  INFO("seed " << seed);
  std::mt19937 random(seed);
  Hub hub;
  for (int round = 0; round < 200; ++round) {
    hub.accepted.clear();
    RawPeer peer(hub.io, hub.at);
    peer.send(kUpgrade);
    REQUIRE(run_until(hub.io, [&] { return !hub.accepted.empty(); }));
    End server;
    server.start(hub.accepted[0]);
    std::string bytes = frame(2, "hello") + frame(9, "ping") + frame(2, std::string(200, 'x')) + frame(8, "");
    for (auto left = 1 + random() % 4; left > 0; --left) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    peer.send_now(bytes);
    peer.shutdown_send();
    REQUIRE(run_until(hub.io, [&] { return !server.closed.empty(); }));
    CHECK(server.closed.size() == 1);
  }
}

TEST_CASE("an upgrade request without its key is answered with an error") {
  Hub hub;
  RawPeer peer(hub.io, hub.at);
  peer.send("GET /channel HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n");
  REQUIRE(run_until(hub.io, [&] { return peer.ended(); }));
  CHECK(peer.has("HTTP/1.1 4"));
  CHECK(hub.accepted.empty());
  CHECK(hub.server.connections() == 0);
}

TEST_CASE("bytes behind the upgrade request are refused instead of being lost") {
  Hub hub;
  RawPeer peer(hub.io, hub.at);
  peer.send_now(kUpgrade + frame(2, "early"));
  REQUIRE(run_until(hub.io, [&] { return peer.ended(); }));
  CHECK(peer.has("HTTP/1.1 400"));
  CHECK(hub.accepted.empty());
}

TEST_CASE("dropping a channel cuts it without a further callback") {
  Hub hub;
  auto [mine, theirs] = hub.pair();
  End client;
  client.start(mine);
  bool closed = false;
  std::shared_ptr<Channel> holder = theirs;
  theirs->start([&](std::string_view) { holder.reset(); }, [&](const Error&) { closed = true; });
  theirs.reset();
  REQUIRE(client.channel->send("drop"));
  REQUIRE(client.channel->send("drop"));
  REQUIRE(run_until(hub.io, [&] { return !client.closed.empty(); }));
  CHECK(client.closed[0].code == Code::kPeerLost);
  CHECK_FALSE(closed);
  CHECK(hub.server.connections() == 0);
}

TEST_CASE("a closed channel may be dropped at once and still delivers") {
  Hub hub;
  auto [mine, theirs] = hub.pair();
  End server;
  server.start(theirs);
  REQUIRE(mine->send(std::string(3 << 20, 'x')));
  mine->close("done");
  mine.reset();
  REQUIRE(run_until(hub.io, [&] { return !server.closed.empty(); }));
  CHECK(server.messages.size() == 1);
  CHECK(server.closed[0].message.find("done") != std::string::npos);
}

TEST_CASE("channels count against connections_max") {
  HttpLimits http;
  http.connections_max = 1;
  Hub hub({}, http);
  auto [mine, theirs] = hub.pair();
  const auto second = hub.connect();
  REQUIRE_FALSE(second);
  CHECK(second.error().code == Code::kUnavailable);
  theirs.reset();
  CHECK(hub.connect());
}

TEST_CASE("a server that stops leaves its channels alone") {
  Hub hub;
  auto [mine, theirs] = hub.pair();
  hub.server.stop();
  End client;
  End server;
  client.start(mine);
  server.start(theirs);
  REQUIRE(client.channel->send("still"));
  REQUIRE(run_until(hub.io, [&] { return server.messages.size() == 1; }));
}

TEST_CASE("connecting reports refused, silent and foreign servers by their kind") {
  boost::asio::io_context io;
  std::vector<Error> errors;
  const auto done = [&](const Result<std::shared_ptr<Channel>>& opened) {
    errors.push_back(opened ? Error{} : opened.error());
  };
  Tcp::acceptor silent(io, Tcp::endpoint(boost::asio::ip::address_v4::loopback(), 0));
  const HostPort at{.host = "127.0.0.1", .port = silent.local_endpoint().port()};

  connect_channel(io, at, "/channel", {}, milliseconds(100), done);
  REQUIRE(run_until(io, [&] { return errors.size() == 1; }));
  CHECK(errors[0].code == Code::kDeadline);

  connect_channel(io, at, "/a b", {}, milliseconds(100), done);
  connect_channel(io, at, "/a", {{"x", "a\nb"}}, milliseconds(100), done);
  CHECK(errors.size() == 1);
  REQUIRE(run_until(io, [&] { return errors.size() == 3; }));
  CHECK(errors[1].code == Code::kInvalid);
  CHECK(errors[2].code == Code::kInvalid);

  const auto cancelled = connect_channel(io, at, "/a", {}, milliseconds(10000), done);
  cancelled->cancel();
  connect_channel(io, at, "/a", {}, milliseconds(10000), done)->abandon();
  REQUIRE(run_until(io, [&] { return errors.size() == 4; }));
  CHECK(errors[3].code == Code::kAborted);

  silent.close();
  connect_channel(io, at, "/a", {}, milliseconds(10000), done);
  REQUIRE(run_until(io, [&] { return errors.size() == 5; }));
  CHECK(errors[4].code == Code::kUnavailable);
  io.restart();
  io.run_for(kLong);
  CHECK(errors.size() == 5);
}

TEST_CASE("a server that answers the upgrade with nonsense or hangs up gives one error") {
  for (const auto& [bytes, code] :
       {std::pair(std::string("SSH-2.0\r\n\r\n"), Code::kProtocol),
        std::pair(std::string("HTTP/1.1 101 Switching Protocols\r\n\r\n"), Code::kProtocol),
        std::pair(std::string(), Code::kUnavailable)}) {
    boost::asio::io_context io;
    Tcp::acceptor acceptor(io, Tcp::endpoint(boost::asio::ip::address_v4::loopback(), 0));
    std::optional<RawPeer> peer;
    acceptor.async_accept([&, text = bytes](boost::system::error_code, Tcp::socket socket) {
      peer.emplace(std::move(socket));
      peer->send_now(text);
      peer->shutdown_send();
    });
    std::vector<Error> errors;
    connect_channel(io, HostPort{.host = "127.0.0.1", .port = acceptor.local_endpoint().port()}, "/c", {},
                    milliseconds(10000), [&](const Result<std::shared_ptr<Channel>>& opened) {
                      errors.push_back(opened ? Error{} : opened.error());
                    });
    REQUIRE(run_until(io, [&] { return !errors.empty(); }));
    INFO(errors[0].message);
    CHECK(errors[0].code == code);
  }
}

TEST_CASE("an io_context may be destroyed while a channel is being connected") {
  auto canary = std::make_shared<int>(1);
  std::shared_ptr<Pending> handle;
  {
    boost::asio::io_context io;
    Tcp::acceptor silent(io, Tcp::endpoint(boost::asio::ip::address_v4::loopback(), 0));
    const HostPort at{.host = "127.0.0.1", .port = silent.local_endpoint().port()};
    std::optional<RawPeer> peer;
    silent.async_accept(
        [&](boost::system::error_code, Tcp::socket socket) { peer.emplace(std::move(socket)); });
    handle = connect_channel(io, at, "/c", {}, milliseconds(10000), [canary](const auto&) {});
    connect_channel(io, at, "/c", {}, milliseconds(10000), [canary](const auto&) {});
    REQUIRE(run_until(io, [&] { return peer && peer->has("\r\n\r\n"); }));
    peer.reset();
  }
  handle->cancel();
  CHECK(canary.use_count() == 1);
}

}  // namespace kvferry
