#include "common/control/channel.h"

#include <catch2/catch.hpp>
#include <random>

#include "tests/unit/http/channel_hub.h"

namespace kvferry {

using namespace http_test;

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
      std::string& message = sent.emplace_back(random() % size_max, static_cast<char>(random()));
      if (!message.empty()) {
        message[random() % message.size()] = static_cast<char>(i);
      }
      REQUIRE(client.channel->send(std::string(message)));
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

}  // namespace kvferry
