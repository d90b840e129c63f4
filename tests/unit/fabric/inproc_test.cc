#include <catch2/catch.hpp>

#include "tests/support/fabric_fixture.h"
#include "tests/support/rng.h"
#include "transport/inproc/inproc.h"

using namespace kvferry;
using namespace kvferry::test;

namespace {

struct Ends {
  explicit Ends(std::uint64_t block_bytes = 4096) {
    SendQueueLimits limits;
    limits.cut.payload_bytes_max = block_bytes;
    limits.chunks_max = 1000;
    send = std::make_unique<InprocSendFabric>(network, limits, send_log.sink());
    receive = std::make_unique<InprocReceiveFabric>(network, receive_log.sink());
    send_log.set_pump([this] { return network.step(); });
    receive_log.set_pump([this] { return network.step(); });
  }

  EventLog send_log;
  EventLog receive_log;
  InprocNetwork network;
  std::unique_ptr<InprocSendFabric> send;
  std::unique_ptr<InprocReceiveFabric> receive;
};

}  // namespace

TEST_CASE("inproc moves every byte of every layout pair") {
  for (const FabricCase& spec : standard_cases()) {
    INFO(spec.name);
    FabricFixture fixture(spec);
    Ends ends;
    CHECK(fixture.run(*ends.send, ends.send_log, *ends.receive, ends.receive_log) == "");
    CHECK(ends.receive_log.count<fabric_event::Rejected>() == 0);
  }
}

TEST_CASE("inproc does nothing until it is stepped, and then the same in every run") {
  std::string first;
  for (int run = 0; run < 2; ++run) {
    FabricFixture fixture(standard_cases()[1]);
    Ends ends;
    REQUIRE(fixture.connect(*ends.send, ends.send_log, *ends.receive) == "");
    for (const auto& pair : fixture.pairs()) {
      for (ChunkJob& job : fixture.jobs(pair)) {
        ends.send->post(kPeer, std::move(job));
      }
    }
    CHECK(ends.send_log.count<fabric_event::ChunkDone>() == 0);
    Rng random(5);
    while (ends.network.step(random.next())) {
    }
    CHECK(fixture.mismatch() == "");
    std::string trace;
    for (const auto& done : ends.send_log.all<fabric_event::ChunkDone>()) {
      trace += fmt::format("{}/{}@{} ", done.key.grant.decode_rank, done.ticket, done.last_done);
    }
    CHECK((first.empty() || trace == first));
    first = trace;
  }
}

TEST_CASE("chunks of one transfer complete in order under any interleaving") {
  const auto seed = test_seed(0x1227);
  INFO("seed " << seed);
  Rng random(seed);
  FabricCase spec = standard_cases()[0];
  spec.chunk_tokens = 32;
  FabricFixture fixture(spec);
  Ends ends(1 << 14);
  REQUIRE(fixture.connect(*ends.send, ends.send_log, *ends.receive) == "");
  for (const auto& pair : fixture.pairs()) {
    for (ChunkJob& job : fixture.jobs(pair)) {
      ends.send->post(kPeer, std::move(job));
    }
  }
  while (ends.network.step(random.next())) {
  }
  for (const auto& pair : fixture.pairs()) {
    std::uint64_t expected = 1;
    for (const auto& done : ends.send_log.all<fabric_event::ChunkDone>()) {
      if (done.key == fixture.key(pair)) {
        CHECK(done.ticket == expected);
        ++expected;
      }
    }
    CHECK(expected == fixture.jobs(pair).size() + 1);
  }
  CHECK(ends.receive_log.count<fabric_event::Landed>() == fixture.pairs().size());
}

TEST_CASE("a cancelled transfer writes nothing after Drained, a closed grant nothing after GrantClosed") {
  for (const bool close_first : {false, true}) {
    FabricFixture fixture(standard_cases()[0]);
    Ends ends;
    REQUIRE(fixture.connect(*ends.send, ends.send_log, *ends.receive) == "");
    const auto pair = fixture.pairs().front();
    for (ChunkJob& job : fixture.jobs(pair)) {
      ends.send->post(kPeer, std::move(job));
    }
    for (int i = 0; i < 12; ++i) {
      REQUIRE(ends.network.step());
    }
    if (close_first) {
      ends.receive->close(fixture.key(pair).grant);
      REQUIRE(ends.receive_log.wait_for<fabric_event::GrantClosed>());
    } else {
      ends.send->cancel(kPeer, fixture.key(pair));
      REQUIRE(ends.send_log.wait_for<fabric_event::Drained>());
    }
    CHECK(fixture.mismatch() != "");  // it was really in the middle
    CHECK(fixture.foreign_bytes() == "");
    const auto& pool = *fixture.destinations()[pair.decode];
    for (std::uint32_t b = 0; b < pool.buffer_count(); ++b) {
      std::fill(pool.buffer(b).begin(), pool.buffer(b).end(), kDstGuard);
    }
    ends.network.run();
    for (std::uint32_t b = 0; b < pool.buffer_count(); ++b) {
      const auto bytes = pool.buffer(b);
      CHECK(std::all_of(bytes.begin(), bytes.end(), [](std::byte byte) { return byte == kDstGuard; }));
    }
    CHECK(ends.receive_log.count<fabric_event::Landed>() == 0);
  }
}

TEST_CASE("a fence from either end brings both ends down once") {
  for (const bool from_sender : {false, true}) {
    FabricFixture fixture(standard_cases()[0]);
    Ends ends;
    REQUIRE(fixture.connect(*ends.send, ends.send_log, *ends.receive) == "");
    for (ChunkJob& job : fixture.jobs(fixture.pairs().front())) {
      ends.send->post(kPeer, std::move(job));
    }
    from_sender ? ends.send->fence(kPeer) : ends.receive->fence(kPeer);
    from_sender ? ends.send->fence(kPeer) : ends.receive->fence(kPeer);
    ends.network.run();
    CHECK(ends.send_log.count<fabric_event::PeerDown>() == 1);
    CHECK(ends.receive_log.count<fabric_event::PeerDown>() == 1);
    CHECK(ends.receive_log.count<fabric_event::Landed>() == 0);
    CHECK(ends.network.idle());
  }
}

TEST_CASE("a token works for one session only") {
  FabricFixture fixture(standard_cases()[0]);
  Ends ends;
  const auto offer = ends.receive->offer(3);
  REQUIRE(offer.has_value());
  ends.send->connect(1, *offer);
  ends.send->connect(2, *offer);
  ends.network.run();
  CHECK(ends.send_log.count<fabric_event::PeerUp>() == 1);
  CHECK(ends.send_log.count<fabric_event::PeerDown>() == 1);
}

TEST_CASE("a chunk above the limit fails with a clear refusal and the others arrive") {
  FabricFixture fixture(standard_cases()[0]);
  EventLog send_log;
  EventLog receive_log;
  InprocNetwork network;
  SendQueueLimits limits;
  limits.chunks_max = 1;
  InprocSendFabric send(network, limits, send_log.sink());
  InprocReceiveFabric receive(network, receive_log.sink());
  send_log.set_pump([&network] { return network.step(); });
  REQUIRE(fixture.connect(send, send_log, receive) == "");
  auto jobs = fixture.jobs(fixture.pairs().front());
  REQUIRE(jobs.size() >= 2);
  send.post(kPeer, jobs[0]);
  send.post(kPeer, jobs[1]);
  network.run();
  REQUIRE(send_log.count<fabric_event::ChunkFailed>() == 1);
  const auto failed = send_log.all<fabric_event::ChunkFailed>().front();
  CHECK(failed.ticket == 2);
  CHECK(failed.error.code == Code::kExhausted);
  CHECK(send_log.count<fabric_event::ChunkDone>() == 1);
}
