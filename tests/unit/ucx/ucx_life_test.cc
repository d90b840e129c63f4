#include <catch2/catch.hpp>

#include <cstring>
#include <ctime>
#include <thread>

#include "tests/unit/ucx/ucx_rig.h"

namespace kvferry::test {
namespace {

/// Many blocks per transfer, so that something is always under way when the test interferes.
FabricCase long_case() {
  FabricCase spec = standard_cases()[1];
  spec.model = small_mla(2);
  spec.pages = 128;
  spec.tokens = 2000;
  spec.chunk_tokens = 500;
  return spec;
}

std::size_t post_all(SendFabric& send, const FabricFixture& fixture) {
  std::size_t chunks = 0;
  for (const auto& pair : fixture.pairs()) {
    for (auto& job : fixture.jobs(pair)) {
      send.post(kPeer, std::move(job));
      ++chunks;
    }
  }
  return chunks;
}

bool all_guard(const Pool& pool) {
  for (std::uint32_t b = 0; b < pool.buffer_count(); ++b) {
    for (const std::byte value : pool.buffer(b)) {
      if (value != kDstGuard) {
        return false;
      }
    }
  }
  return true;
}

void overwrite(const Pool& pool, std::byte value) {
  for (std::uint32_t b = 0; b < pool.buffer_count(); ++b) {
    std::memset(pool.buffer(b).data(), static_cast<int>(value), pool.buffer(b).size());
  }
}

}  // namespace

TEST_CASE("blocks for a grant that is closed change nothing") {
  for (const auto& options : {over_shm(), over_tcp()}) {
    FabricFixture fixture(standard_cases()[0]);
    UcxRig rig(options);
    REQUIRE(fixture.connect(*rig.send, rig.send_log, *rig.receive) == "");
    for (RankIndex rank = 0; rank < fixture.destinations().size(); ++rank) {
      rig.receive->close(fixture.grant(rank).key);
    }
    REQUIRE(rig.receive_log.wait_for<fabric_event::GrantClosed>(fixture.destinations().size()));
    const std::size_t chunks = post_all(*rig.send, fixture);
    REQUIRE(rig.send_log.wait_for<fabric_event::ChunkDone>(chunks));
    // The drain's answer proves that every block before it has been handled.
    for (const auto& pair : fixture.pairs()) {
      rig.send->cancel(kPeer, fixture.key(pair));
    }
    REQUIRE(rig.send_log.wait_for<fabric_event::Drained>(fixture.pairs().size()));
    for (const auto& pool : fixture.destinations()) {
      CHECK(all_guard(*pool));
    }
    CHECK(rig.receive_log.count<fabric_event::Landed>() == 0);
    CHECK(rig.receive->stats().discarded > 0);
    CHECK(rig.receive->stats().blocks == 0);
    CHECK(rig.receive_log.count<fabric_event::PeerDown>() == 0);
  }
}

TEST_CASE("a source that the grant does not name loses its connection and changes nothing") {
  FabricFixture fixture(standard_cases()[0]);
  UcxRig rig(over_shm());
  for (const auto& pool : fixture.destinations()) {
    rig.receive->add_pool(pool);
  }
  for (RankIndex rank = 0; rank < fixture.destinations().size(); ++rank) {
    rig.receive->open(fixture.grant(rank, kPeer + 1));
  }
  rig.send->connect(kPeer, take(rig.receive->offer(kPeer)));
  REQUIRE(rig.send_log.wait_for<fabric_event::PeerUp>());
  post_all(*rig.send, fixture);
  REQUIRE(rig.receive_log.wait_for<fabric_event::PeerDown>());
  REQUIRE(rig.send_log.wait_for<fabric_event::PeerDown>());
  CHECK(rig.receive_log.count<fabric_event::Rejected>() == 1);
  CHECK(rig.receive_log.count<fabric_event::Landed>() == 0);
  for (const auto& pool : fixture.destinations()) {
    CHECK(all_guard(*pool));
  }
}

TEST_CASE("after Drained nothing of a cancelled transfer lands any more") {
  for (const auto& path : all_paths()) {
    INFO(path.name);
    FabricFixture fixture(long_case());
    UcxRig rig(path.options);
    REQUIRE(fixture.connect(*rig.send, rig.send_log, *rig.receive) == "");
    post_all(*rig.send, fixture);
    REQUIRE(rig.send_log.wait_for<fabric_event::ChunkDone>());
    for (const auto& pair : fixture.pairs()) {
      rig.send->cancel(kPeer, fixture.key(pair));
    }
    REQUIRE(rig.send_log.wait_for<fabric_event::Drained>(fixture.pairs().size()));
    CHECK(fixture.foreign_bytes() == "");
    for (const auto& pool : fixture.destinations()) {
      overwrite(*pool, kDstGuard);
    }
    // A second drain is another round trip through the same connection: whatever was late would be there by
    // then.
    rig.send->cancel(kPeer, fixture.key(fixture.pairs()[0]));
    REQUIRE(rig.send_log.wait_for<fabric_event::Drained>(fixture.pairs().size() + 1));
    for (const auto& pool : fixture.destinations()) {
      CHECK(all_guard(*pool));
    }
    CHECK(rig.send_log.count<fabric_event::PeerDown>() == 0);
  }
}

TEST_CASE("a cancelled room can be sent again under a new generation on the same connection") {
  FabricCase spec = long_case();
  FabricFixture first(spec);
  UcxRig rig(over_shm());
  REQUIRE(first.connect(*rig.send, rig.send_log, *rig.receive) == "");
  post_all(*rig.send, first);
  for (const auto& pair : first.pairs()) {
    rig.send->cancel(kPeer, first.key(pair));
  }
  REQUIRE(rig.send_log.wait_for<fabric_event::Drained>(first.pairs().size()));
  spec.seed = 2;
  FabricFixture second(spec);
  for (const auto& pool : second.destinations()) {
    rig.receive->add_pool(pool);
  }
  for (RankIndex rank = 0; rank < second.destinations().size(); ++rank) {
    rig.receive->open(second.grant(rank));
  }
  const std::size_t landed = rig.receive_log.count<fabric_event::Landed>();
  post_all(*rig.send, second);
  REQUIRE(rig.receive_log.wait_for<fabric_event::Landed>(landed + second.pairs().size()));
  CHECK(second.mismatch() == "");
}

TEST_CASE("cancelling what was never posted, or a peer that is unknown, is answered with Drained") {
  FabricFixture fixture(standard_cases()[0]);
  UcxRig rig(over_shm());
  rig.send->cancel(kPeer, fixture.key(fixture.pairs()[0]));
  REQUIRE(rig.send_log.wait_for<fabric_event::Drained>(1));
  REQUIRE(fixture.connect(*rig.send, rig.send_log, *rig.receive) == "");
  rig.send->cancel(kPeer, fixture.key(fixture.pairs()[0]));
  rig.send->cancel(kPeer, fixture.key(fixture.pairs()[0]));
  CHECK(rig.send_log.wait_for<fabric_event::Drained>(3));
}

TEST_CASE("a chunk for a peer that is not connected fails at once") {
  FabricFixture fixture(standard_cases()[0]);
  UcxRig rig(over_shm());
  rig.send->post(kPeer, fixture.jobs(fixture.pairs()[0])[0]);
  REQUIRE(rig.send_log.wait_for<fabric_event::ChunkFailed>());
  CHECK(rig.send_log.all<fabric_event::ChunkFailed>()[0].error.code == Code::kUnavailable);
}

TEST_CASE("a chunk whose plan does not fit its pool fails and the connection lives") {
  for (const auto& path : all_paths()) {
    INFO(path.name);
    FabricFixture fixture(standard_cases()[0]);
    UcxRig rig(path.options);
    REQUIRE(fixture.connect(*rig.send, rig.send_log, *rig.receive) == "");
    auto job = fixture.jobs(fixture.pairs()[0])[0];
    auto plan = std::make_shared<Plan>(*job.plan);
    plan->runs[0].src_row = UINT64_MAX / 2;
    job.plan = plan;
    rig.send->post(kPeer, job);
    REQUIRE(rig.send_log.wait_for<fabric_event::ChunkFailed>());
    if (path.options.put_mode()) {
      auto outside = fixture.jobs(fixture.pairs()[1])[0];
      auto changed = std::make_shared<Plan>(*outside.plan);
      changed->runs[0].dst_row = UINT64_MAX / 2;
      outside.plan = changed;
      rig.send->post(kPeer, outside);
      REQUIRE(rig.send_log.wait_for<fabric_event::ChunkFailed>(2));
    }
    for (const auto& pair : fixture.pairs()) {
      rig.send->cancel(kPeer, fixture.key(pair));
    }
    REQUIRE(rig.send_log.wait_for<fabric_event::Drained>(fixture.pairs().size()));
    CHECK(rig.send_log.count<fabric_event::PeerDown>() == 0);
  }
}

TEST_CASE(
    "a fence by the sender in the middle ends in PeerDown on both sides, and a new offer connects again") {
  for (const auto& path : all_paths()) {
    INFO(path.name);
    FabricFixture fixture(long_case());
    UcxRig rig(path.options);
    REQUIRE(fixture.connect(*rig.send, rig.send_log, *rig.receive) == "");
    post_all(*rig.send, fixture);
    REQUIRE(rig.send_log.wait_for<fabric_event::ChunkDone>());
    rig.send->fence(kPeer);
    REQUIRE(rig.send_log.wait_for<fabric_event::PeerDown>());
    REQUIRE(rig.receive_log.wait_for<fabric_event::PeerDown>());
    CHECK(fixture.foreign_bytes() == "");
    rig.send->connect(kPeer, take(rig.receive->offer(kPeer)));
    REQUIRE(rig.send_log.wait_for<fabric_event::PeerUp>(2));
  }
}

TEST_CASE("after a fence by the receiver nothing of the peer lands any more") {
  for (const auto& path : all_paths()) {
    INFO(path.name);
    FabricFixture fixture(long_case());
    UcxRig rig(path.options);
    REQUIRE(fixture.connect(*rig.send, rig.send_log, *rig.receive) == "");
    post_all(*rig.send, fixture);
    REQUIRE(rig.send_log.wait_for<fabric_event::ChunkDone>());
    rig.receive->fence(kPeer);
    REQUIRE(rig.receive_log.wait_for<fabric_event::PeerDown>());
    if (!path.options.put_mode()) {
      for (const auto& pool : fixture.destinations()) {
        overwrite(*pool, kDstGuard);
      }
    }
    REQUIRE(rig.send_log.wait_for<fabric_event::PeerDown>());
    CHECK(fixture.foreign_bytes() == "");
    if (!path.options.put_mode()) {
      for (const auto& pool : fixture.destinations()) {
        CHECK(all_guard(*pool));
      }
    }
  }
}

TEST_CASE("a fabric that is destroyed in the middle leaves the other end alive") {
  for (const auto& path : all_paths()) {
    INFO(path.name);
    FabricFixture fixture(long_case());
    UcxRig rig(path.options);
    REQUIRE(fixture.connect(*rig.send, rig.send_log, *rig.receive) == "");
    post_all(*rig.send, fixture);
    REQUIRE(rig.send_log.wait_for<fabric_event::ChunkDone>());
    rig.send.reset();
    REQUIRE(rig.receive_log.wait_for<fabric_event::PeerDown>());
    CHECK(fixture.foreign_bytes() == "");
  }
}

TEST_CASE("an idle pair of fabrics sleeps") {
  FabricFixture fixture(standard_cases()[0]);
  UcxRig rig(over_shm());
  REQUIRE(fixture.run(*rig.send, rig.send_log, *rig.receive, rig.receive_log) == "");
  // Ten guard wake-ups take a second; a busy loop would make millions of rounds in the CPU time allowed here.
  const auto cpu_ns = [] {
    timespec now{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return now.tv_sec * 1'000'000'000 + now.tv_nsec;
  };
  const std::uint64_t wakeups = rig.send->stats().wakeups;
  const auto begin_cpu = cpu_ns();
  while (rig.send->stats().wakeups < wakeups + 10) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));  // polls a fact
  }
  CHECK(cpu_ns() - begin_cpu < 200'000'000);
}

}  // namespace kvferry::test
