#include <catch2/catch.hpp>
#include <random>

#include "tests/unit/http/channel_hub.h"

namespace kvferry {

using namespace http_test;

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

}  // namespace kvferry
