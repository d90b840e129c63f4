#include <catch2/catch.hpp>

#include "tests/unit/http/channel_hub.h"

namespace kvferry {

using namespace http_test;

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
