#include <netinet/tcp.h>

#include <set>

#include "tests/unit/fabric/tcp_support.h"

using namespace kvferry;
using namespace kvferry::test;

TEST_CASE("tcp moves every byte of every layout pair") {
  for (const std::uint32_t streams : {1u, 2u, 5u}) {
    for (const FabricCase& spec : standard_cases()) {
      INFO(spec.name << " over " << streams << " streams");
      TcpSendConfig config;
      config.streams = streams;
      FabricFixture fixture(spec);
      TcpEnds ends(config);
      CHECK(fixture.run(*ends.send, ends.send_log, *ends.receive, ends.receive_log) == "");
      CHECK(ends.receive_log.count<fabric_event::Rejected>() == 0);
      CHECK(ends.receive_log.count<fabric_event::PeerDown>() == 0);
      CHECK(ends.send_log.all<fabric_event::PeerUp>().front().carries == fmt::format("tcp {}x", streams));
      std::uint64_t expected = 0;
      std::uint64_t done_bytes = 0;
      for (const auto& pair : fixture.pairs()) {
        expected += fixture.bytes(pair);
      }
      for (const auto& done : ends.send_log.all<fabric_event::ChunkDone>()) {
        done_bytes += done.bytes;
        CHECK(done.first_post <= done.last_done);
      }
      CHECK(done_bytes == expected);
      CHECK(ends.receive->counters().placed_bytes == expected);
      CHECK(ends.receive->counters().discarded_blocks == 0);
    }
  }
}

TEST_CASE("tcp moves every byte with tiny blocks, tiny socket buffers and a decode prefix") {
  TcpSendConfig send_config;
  send_config.streams = 3;
  send_config.queue.cut.payload_bytes_max = 3000;
  send_config.queue.cut.spans_max = 7;
  send_config.socket.buffer_bytes = 4096;
  TcpReceiveConfig receive_config;
  receive_config.socket.buffer_bytes = 4096;
  for (FabricCase spec : standard_cases()) {
    INFO(spec.name);
    spec.tokens = 200;
    spec.prefix = 64;
    spec.seed = 99;
    FabricFixture fixture(spec);
    TcpEnds ends(send_config, receive_config);
    CHECK(fixture.run(*ends.send, ends.send_log, *ends.receive, ends.receive_log) == "");
  }
}

TEST_CASE("tcp works over IPv6 loopback") {
  TcpReceiveConfig config;
  config.host = "::1";
  EventLog receive_log;
  auto receive = TcpReceiveFabric::create(config, receive_log.sink());
  if (!receive && receive.error().message.find("Cannot assign") != std::string::npos) {
    WARN("skipped: no IPv6 loopback on this machine");
    return;
  }
  REQUIRE(receive.has_value());
  EventLog send_log;
  auto send = make_send(send_log);
  FabricFixture fixture(standard_cases()[1]);
  CHECK(fixture.run(*send, send_log, **receive, receive_log) == "");
}

TEST_CASE("tcp uses the congestion control that it is told to, and names those that there are") {
  TcpSendConfig config;
  config.socket.congestion = "reno";  // every kernel has it
  RawListener listener;
  const auto offer = parse_tcp_offer(listener.offer());
  REQUIRE(offer.has_value());
  const auto fd = connect_tcp(offer->host, offer->port, config.socket);
  REQUIRE(fd.has_value());
  std::array<char, 16> name{};
  socklen_t bytes = name.size();
  REQUIRE(::getsockopt(fd->get(), IPPROTO_TCP, TCP_CONGESTION, name.data(), &bytes) == 0);
  CHECK(std::string(name.data()) == "reno");
  config.socket.congestion = "nosuch";
  const auto refused = TcpSendFabric::create(config, [](FabricEvent&&) {});
  REQUIRE_FALSE(refused.has_value());
  CHECK(refused.error().code == Code::kInvalid);
  CHECK_THAT(refused.error().message, Catch::Contains("nosuch") && Catch::Contains("reno"));
}

TEST_CASE("a short transfer is not held up by a long one") {
  // One stream and a slow socket: blocks of the two transfers must alternate slice by slice, so the short one
  // is done while the long one still has chunks to go.
  TcpSendConfig config;
  config.streams = 1;
  config.socket.buffer_bytes = 64 << 10;
  config.queue.cut.payload_bytes_max = 8 << 10;
  FabricCase spec = standard_cases()[0];
  spec.tokens = 1024;
  spec.chunk_tokens = 64;
  FabricFixture fixture(spec);
  RawListener listener;
  EventLog log;
  auto send = make_send(log, config);
  send->connect(kPeer, listener.offer());
  RawPeer peer = listener.accept_and_welcome();
  REQUIRE(log.wait_for<fabric_event::PeerUp>());
  const auto& pairs = fixture.pairs();
  for (ChunkJob& job : fixture.jobs(pairs[0])) {
    send->post(kPeer, std::move(job));
  }
  send->post(kPeer, fixture.jobs(pairs[1]).front());
  const std::uint64_t short_bytes = fixture.jobs(pairs[1]).front().plan->bytes;
  std::uint64_t seen_long = 0;
  std::uint64_t seen_short = 0;
  while (seen_short < short_bytes) {
    BlockBytes bytes;
    REQUIRE(peer.read(bytes));
    const auto header = decode_block(bytes);
    REQUIRE(header.has_value());
    std::vector<std::byte> payload(header->payload_bytes);
    REQUIRE(peer.read(payload));
    (header->key == fixture.key(pairs[0]) ? seen_long : seen_short) += header->payload_bytes;
  }
  // What the socket swallowed before the short one was posted, plus one slice per slice of the short one.
  CHECK(seen_long < fixture.bytes(pairs[0]));
  send.reset();
}

TEST_CASE("an empty chunk completes, and an empty transfer lands") {
  FabricFixture fixture(standard_cases()[0]);
  TcpEnds ends;
  REQUIRE(fixture.connect(*ends.send, ends.send_log, *ends.receive) == "");
  ChunkJob job;
  job.key = fixture.key(fixture.pairs().front());
  job.plan = std::make_shared<Plan>();
  job.ticket = 1;
  ends.send->post(kPeer, job);
  job.ticket = 2;
  job.last = true;
  ends.send->post(kPeer, job);
  REQUIRE(ends.send_log.wait_for<fabric_event::ChunkDone>(2));
  REQUIRE(ends.receive_log.wait_for<fabric_event::Landed>());
  CHECK(ends.receive_log.all<fabric_event::Landed>().front().bytes == 0);
  CHECK(ends.send_log.all<fabric_event::ChunkDone>()[0].ticket == 1);
}

TEST_CASE("a chunk that does not fit its pool fails alone") {
  FabricFixture fixture(standard_cases()[0]);
  TcpEnds ends;
  REQUIRE(fixture.connect(*ends.send, ends.send_log, *ends.receive) == "");
  ChunkJob job = fixture.jobs(fixture.pairs().front()).front();
  Plan bad = *job.plan;
  bad.runs[0].src_row = std::uint64_t{1} << 40;
  job.plan = std::make_shared<Plan>(bad);
  ends.send->post(kPeer, job);
  REQUIRE(ends.send_log.wait_for<fabric_event::ChunkFailed>());
  CHECK(ends.send_log.all<fabric_event::ChunkFailed>().front().error.code == Code::kInvalid);
  for (ChunkJob& good : fixture.jobs(fixture.pairs().back())) {
    ends.send->post(kPeer, std::move(good));
  }
  CHECK(ends.receive_log.wait_for<fabric_event::Landed>());
}

TEST_CASE("calls for a peer that is not connected are answered") {
  EventLog log;
  auto send = make_send(log);
  FabricFixture fixture(standard_cases()[0]);
  send->post(9, fixture.jobs(fixture.pairs().front()).front());
  send->cancel(9, fixture.key(fixture.pairs().front()));
  send->fence(9);
  REQUIRE(log.wait_for<fabric_event::Drained>());
  CHECK(log.count<fabric_event::ChunkFailed>() == 1);
  send->connect(9, FabricOffer{FabricKind::kTcp, "{}"});
  REQUIRE(log.wait_for<fabric_event::PeerDown>());
  CHECK(log.all<fabric_event::PeerDown>().front().error.code == Code::kInvalid);
}

TEST_CASE("connecting to a closed port brings PeerDown once") {
  FabricOffer offer;
  {
    EventLog log;
    offer = make_receive(log)->offer(1).value();
  }
  EventLog log;
  auto send = make_send(log);
  send->connect(kPeer, offer);
  REQUIRE(log.wait_for<fabric_event::PeerDown>());
  send.reset();
  CHECK(log.count<fabric_event::PeerDown>() == 1);
  CHECK(log.count<fabric_event::PeerUp>() == 0);
}

TEST_CASE("a receiver that accepts and then says nothing is given up after the deadline") {
  RawListener listener;
  EventLog log;
  TcpSendConfig config;
  config.streams = 1;
  config.connect_deadline = 20'000'000;
  auto send = make_send(log, config);
  send->connect(kPeer, listener.offer());
  RawPeer peer = listener.accept();
  REQUIRE(log.wait_for<fabric_event::PeerDown>());
  CHECK(log.all<fabric_event::PeerDown>().front().error.code == Code::kDeadline);
}

TEST_CASE("a receiver that breaks the protocol brings PeerDown, not an end of the process") {
  for (const int kind : {0, 1, 2}) {
    RawListener listener;
    EventLog log;
    TcpSendConfig config;
    config.streams = 1;
    auto send = make_send(log, config);
    send->connect(kPeer, listener.offer());
    RawPeer peer = kind == 0 ? listener.accept() : listener.accept_and_welcome();
    if (kind == 2) {
      CHECK(peer.write(make_notice(TransferKey{{1, 1, 0}, 0}, 1, 1)));
    } else {
      CHECK(peer.write(1000, std::byte{0xFF}));
    }
    REQUIRE(log.wait_for<fabric_event::PeerDown>());
    CHECK(log.all<fabric_event::PeerDown>().front().error.code == Code::kProtocol);
  }
}

TEST_CASE("a wildcard listener without an address to advertise is refused") {
  for (const char* host : {"0.0.0.0", "::"}) {
    TcpReceiveConfig config;
    config.host = host;
    const auto fabric = TcpReceiveFabric::create(config, [](FabricEvent&&) {});
    REQUIRE_FALSE(fabric.has_value());
    CHECK(fabric.error().message.find("advertise") != std::string::npos);
  }
  TcpReceiveConfig config;
  config.host = "localhost.invalid";
  CHECK_FALSE(TcpReceiveFabric::create(config, [](FabricEvent&&) {}).has_value());
}

TEST_CASE("an offer names its address and a token that differs each time") {
  EventLog log;
  auto receive = make_receive(log);
  std::set<std::string> tokens;
  for (PeerId peer = 1; peer <= 20; ++peer) {
    const auto offer = receive->offer(peer);
    REQUIRE(offer.has_value());
    tokens.insert(offer->json);
    CHECK(parse_tcp_offer(*offer)->port == receive->port());
  }
  CHECK(tokens.size() == 20);
}

TEST_CASE("a malformed offer is refused by field") {
  const auto refused = [](const char* json, const char* field) {
    const auto parsed = parse_tcp_offer(FabricOffer{FabricKind::kTcp, json});
    return !parsed && parsed.error().message.find(field) != std::string::npos;
  };
  const std::string token(32, 'a');
  CHECK(refused("", "object"));
  CHECK(refused("[]", "object"));
  CHECK(refused(R"({"host":1})", "host"));
  CHECK(refused(R"({"host":"127.0.0.1","port":0})", "port"));
  CHECK(refused(R"({"host":"127.0.0.1","port":65536})", "port"));
  CHECK(refused(R"({"host":"127.0.0.1","port":-1})", "port"));
  CHECK(refused(R"({"host":"127.0.0.1","port":"1"})", "port"));
  CHECK(refused(R"({"host":"127.0.0.1","port":1})", "token"));
  CHECK(refused(R"({"host":"127.0.0.1","port":1,"token":"00"})", "token"));
  CHECK(refused(R"({"host":"127.0.0.1","port":1,"token":"zz000000000000000000000000000000"})", "token"));
  CHECK(parse_tcp_offer(
            FabricOffer{FabricKind::kTcp, R"({"host":"127.0.0.1","port":1,"token":")" + token + "\"}"})
            .has_value());
}
