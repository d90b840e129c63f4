#include "tests/support/rng.h"
#include "tests/unit/fabric/tcp_support.h"

using namespace kvferry;
using namespace kvferry::test;

namespace {

FabricCase long_case() {
  FabricCase spec = standard_cases()[0];
  spec.tokens = 1024;
  spec.chunk_tokens = 32;
  return spec;
}

TcpSendConfig small_blocks() {
  TcpSendConfig config;
  config.queue.cut.payload_bytes_max = 8 << 10;
  config.socket.buffer_bytes = 64 << 10;
  return config;
}

TcpReceiveConfig small_buffers() {
  TcpReceiveConfig config;
  config.socket.buffer_bytes = 64 << 10;
  return config;
}

}  // namespace

TEST_CASE("after Drained nothing of the transfer lands, wherever the cancel hit") {
  const auto seed = test_seed(0xD7A1);
  INFO("seed " << seed);
  Rng random(seed);
  for (int round = 0; round < 8; ++round) {
    FabricFixture fixture(long_case());
    TcpEnds ends(small_blocks(), small_buffers());
    REQUIRE(fixture.connect(*ends.send, ends.send_log, *ends.receive) == "");
    const auto pair = fixture.pairs().front();
    auto jobs = fixture.jobs(pair);
    for (ChunkJob& job : jobs) {
      ends.send->post(kPeer, job);
    }
    REQUIRE(ends.send_log.wait_for<fabric_event::ChunkDone>(random.below(jobs.size() / 2)));
    ends.send->cancel(kPeer, fixture.key(pair));
    ends.send->cancel(kPeer, fixture.key(pair));
    REQUIRE(ends.send_log.wait_for<fabric_event::Drained>());
    CHECK(fixture.foreign_bytes() == "");
    const auto& pool = *fixture.destinations()[pair.decode];
    fill_guard(pool);
    // The connection lives: another transfer of the same peer arrives whole, and only that.
    const auto other = fixture.pairs().back();
    for (ChunkJob& job : fixture.jobs(other)) {
      ends.send->post(kPeer, std::move(job));
    }
    REQUIRE(ends.receive_log.wait([&](const EventLog::Events& events) {
      return std::any_of(events.begin(), events.end(), [&](const FabricEvent& event) {
        const auto* landed = std::get_if<fabric_event::Landed>(&event);
        return landed != nullptr && landed->key == fixture.key(other);
      });
    }));
    CHECK(all_guard(pool));
    CHECK(fixture.foreign_bytes() == "");
    CHECK(ends.send_log.count<fabric_event::Drained>() == 1);
  }
}

TEST_CASE("after GrantClosed nothing of the room lands, wherever the close hit") {
  const auto seed = test_seed(0xC105);
  INFO("seed " << seed);
  Rng random(seed);
  for (int round = 0; round < 8; ++round) {
    FabricFixture fixture(long_case());
    TcpEnds ends(small_blocks(), small_buffers());
    REQUIRE(fixture.connect(*ends.send, ends.send_log, *ends.receive) == "");
    const auto pair = fixture.pairs().front();
    auto jobs = fixture.jobs(pair);
    for (ChunkJob& job : jobs) {
      ends.send->post(kPeer, job);
    }
    REQUIRE(ends.send_log.wait_for<fabric_event::ChunkDone>(random.below(jobs.size() / 2)));
    ends.receive->close(fixture.key(pair).grant);
    REQUIRE(ends.receive_log.wait_for<fabric_event::GrantClosed>());
    CHECK(fixture.foreign_bytes() == "");
    const auto& pool = *fixture.destinations()[pair.decode];
    fill_guard(pool);
    // The sender does not know and finishes; every late byte is read past.
    REQUIRE(ends.send_log.wait_for<fabric_event::ChunkDone>(jobs.size()));
    ends.send->cancel(kPeer, fixture.key(pair));
    REQUIRE(ends.send_log.wait_for<fabric_event::Drained>());
    CHECK(all_guard(pool));
    CHECK(ends.receive_log.count<fabric_event::PeerDown>() == 0);
  }
}

TEST_CASE("a fence by the sender ends both sides, and the receiver's pages are safe after close") {
  FabricFixture fixture(long_case());
  TcpEnds ends(small_blocks(), small_buffers());
  REQUIRE(fixture.connect(*ends.send, ends.send_log, *ends.receive) == "");
  const auto pair = fixture.pairs().front();
  for (ChunkJob& job : fixture.jobs(pair)) {
    ends.send->post(kPeer, std::move(job));
  }
  REQUIRE(ends.send_log.wait_for<fabric_event::ChunkDone>(3));
  ends.send->fence(kPeer);
  REQUIRE(ends.send_log.wait_for<fabric_event::PeerDown>());
  REQUIRE(ends.receive_log.wait_for<fabric_event::PeerDown>());
  const auto& pool = *fixture.destinations()[pair.decode];
  CHECK(fixture.foreign_bytes() == "");
  fill_guard(pool);
  ends.receive->close(fixture.key(pair).grant);
  REQUIRE(ends.receive_log.wait_for<fabric_event::GrantClosed>());
  CHECK(all_guard(pool));
  CHECK(ends.send_log.count<fabric_event::PeerDown>() == 1);
  CHECK(ends.receive_log.count<fabric_event::PeerDown>() == 1);
}

TEST_CASE("a receiver that goes away brings PeerDown to the sender, and a new session works") {
  FabricFixture fixture(long_case());
  EventLog send_log;
  auto send = make_send(send_log, small_blocks());
  {
    EventLog receive_log;
    auto receive = make_receive(receive_log, small_buffers());
    REQUIRE(fixture.connect(*send, send_log, *receive) == "");
    for (ChunkJob& job : fixture.jobs(fixture.pairs().front())) {
      send->post(kPeer, std::move(job));
    }
    REQUIRE(send_log.wait_for<fabric_event::ChunkDone>(2));
  }
  REQUIRE(send_log.wait_for<fabric_event::PeerDown>());
  FabricFixture fresh(long_case());
  EventLog fresh_send_log;
  EventLog receive_log;
  auto again = make_send(fresh_send_log, small_blocks());
  auto receive = make_receive(receive_log, small_buffers());
  CHECK(fresh.run(*again, fresh_send_log, *receive, receive_log) == "");
}

TEST_CASE("Drained waits for the receiver's answer on every stream") {
  // A receiver played by hand that does not read: the sender must not claim that nothing can land.
  FabricFixture fixture(long_case());
  RawListener listener;
  EventLog log;
  TcpSendConfig config = small_blocks();
  config.streams = 2;
  auto send = make_send(log, config);
  send->connect(kPeer, listener.offer());
  RawPeer first = listener.accept_and_welcome();
  RawPeer second = listener.accept_and_welcome();
  REQUIRE(log.wait_for<fabric_event::PeerUp>());
  const auto pair = fixture.pairs().front();
  for (ChunkJob& job : fixture.jobs(pair)) {
    send->post(kPeer, std::move(job));
  }
  REQUIRE(log.wait_for<fabric_event::ChunkDone>());
  send->cancel(kPeer, fixture.key(pair));
  const auto answer_drain = [&](RawPeer& peer) {
    while (true) {
      BlockBytes bytes;
      REQUIRE(peer.read(bytes));
      auto header = decode_block(bytes);
      REQUIRE(header.has_value());
      std::vector<std::byte> payload(header->payload_bytes);
      REQUIRE(peer.read(payload));
      if (header->type == BlockType::kDrain) {
        CHECK(log.count<fabric_event::Drained>() == 0);
        header->type = BlockType::kDrained;
        REQUIRE(peer.write(*header));
        return;
      }
    }
  };
  answer_drain(first);
  answer_drain(second);
  REQUIRE(log.wait_for<fabric_event::Drained>());
  CHECK(log.count<fabric_event::ChunkDone>() < fixture.jobs(pair).size());
}
