// After Drained, and after PeerDown on either side, not one more byte of the transfer lands.
#include <atomic>
#include <catch2/catch.hpp>
#include <cstring>

#include "tests/support/rng.h"
#include "tests/unit/fabric/shm_support.h"

namespace kvferry::test {
namespace {

using fabric_event::ChunkDone;
using fabric_event::ChunkFailed;
using fabric_event::Drained;
using fabric_event::PeerDown;

constexpr std::uint32_t kRows = 1024;  // 1 MiB
constexpr std::byte kOld{0x11};
constexpr std::byte kNew{0x22};
constexpr std::byte kMark{0x7E};

ShmSendOptions small_slices(std::uint32_t threads) {
  ShmSendOptions options;
  options.copy_threads = threads;
  options.slice_bytes = 64 << 10;
  return options;
}

TEST_CASE("shm: pages may be handed to another transfer in the moment of Drained") {
  // Each round stops a copy in its middle, overwrites the destination inside the Drained event itself, lets
  // another transfer write half of it, and finds no byte of the stopped one.
  const std::uint64_t seed = test_seed(20240611);
  Rng rng(seed);
  INFO("seed " << seed);
  const auto old_source = plain_pool(0, kRows / kPageRows, kOld);
  const auto new_source = plain_pool(0, kRows / kPageRows, kNew);
  const auto destination = plain_pool(0, kRows / kPageRows, std::byte{0});
  ShmEnds ends(small_slices(2));
  ends.on_send = [&](const FabricEvent& event) {
    if (std::holds_alternative<Drained>(event)) {
      std::memset(destination->buffer(0).data(), static_cast<int>(kMark), destination->buffer(0).size());
    }
  };
  ends.receive->add_pool(destination);
  REQUIRE(ends.connect());
  constexpr std::size_t kRounds = 100;
  for (std::size_t round = 1; round <= kRounds; ++round) {
    ends.send->post(kPeer, chunk(transfer_key(2 * round), endless_plan(), old_source));
    wait_for_byte(*destination, rng.below(kRows) * kRowBytes, kOld);
    ends.send->cancel(kPeer, transfer_key(2 * round));
    REQUIRE(ends.send_log.wait_for<Drained>(round));
    ends.send->post(kPeer, chunk(transfer_key(2 * round + 1), row_plan(kRows / 2), new_source));
    REQUIRE(ends.send_log.wait_for<ChunkDone>(round));
    const std::span<const std::byte> bytes = destination->buffer(0);
    REQUIRE(all_bytes_are(bytes.first(bytes.size() / 2), kNew));
    REQUIRE(all_bytes_are(bytes.last(bytes.size() / 2), kMark));
  }
  CHECK(ends.send_log.count<ChunkFailed>() == 0);
}

TEST_CASE("shm: cancelling what is unknown here drains at once") {
  ShmEnds ends;
  ends.send->cancel(kPeer, transfer_key(1));
  REQUIRE(ends.send_log.wait_for<Drained>(1));
  ends.receive->add_pool(plain_pool(0, 4, std::byte{0}));
  REQUIRE(ends.connect());
  ends.send->cancel(kPeer, transfer_key(2));
  CHECK(ends.send_log.wait_for<Drained>(2));
}

TEST_CASE("shm: the sender's fence stops the copies, then both sides hear PeerDown") {
  const auto source = plain_pool(0, kRows / kPageRows, kOld);
  const auto destination = plain_pool(0, kRows / kPageRows, std::byte{0});
  ShmEnds ends(small_slices(2));
  ends.on_receive = [&](const FabricEvent& event) {
    if (std::holds_alternative<PeerDown>(event)) {
      std::memset(destination->buffer(0).data(), static_cast<int>(kMark), destination->buffer(0).size());
    }
  };
  ends.receive->add_pool(destination);
  for (std::size_t round = 1; round <= 20; ++round) {
    REQUIRE(ends.connect());
    ends.send->post(kPeer, chunk(transfer_key(round), endless_plan(), source));
    wait_for_byte(*destination, 0, kOld);
    ends.send->fence(kPeer);
    REQUIRE(ends.send_log.wait_for<PeerDown>(round));
    REQUIRE(ends.receive_log.wait_for<PeerDown>(round));
    CHECK(all_bytes_are(destination->buffer(0), kMark));
  }
  CHECK(ends.send_log.all<PeerDown>()[0].error.code == Code::kAborted);
  CHECK(ends.send_log.count<PeerDown>() == 20);
}

TEST_CASE("shm: the receiver's fence ends only when the sender has let go of the pool") {
  const auto source = plain_pool(0, kRows / kPageRows, kOld);
  const auto destination = plain_pool(0, kRows / kPageRows, std::byte{0});
  ShmEnds ends(small_slices(1));
  ends.on_receive = [&](const FabricEvent& event) {
    if (std::holds_alternative<PeerDown>(event)) {
      std::memset(destination->buffer(0).data(), static_cast<int>(kMark), destination->buffer(0).size());
    }
  };
  ends.receive->add_pool(destination);
  for (std::size_t round = 1; round <= 20; ++round) {
    REQUIRE(ends.connect());
    ends.send->post(kPeer, chunk(transfer_key(round), endless_plan(), source));
    wait_for_byte(*destination, 0, kOld);
    ends.receive->fence(kPeer);
    REQUIRE(ends.receive_log.wait_for<PeerDown>(round));
    REQUIRE(ends.send_log.wait_for<PeerDown>(round));
    CHECK(all_bytes_are(destination->buffer(0), kMark));
  }
}

TEST_CASE("shm: a pool that goes away fails its transfers and nothing else") {
  const auto source = plain_pool(0, kRows / kPageRows, kOld);
  const auto gone = plain_pool(0, kRows / kPageRows, std::byte{0});
  const auto kept = plain_pool(1, kRows / kPageRows, std::byte{0});
  ShmEnds ends(small_slices(2));
  ends.on_send = [&](const FabricEvent& event) {
    if (std::holds_alternative<ChunkFailed>(event)) {
      std::memset(gone->buffer(0).data(), static_cast<int>(kMark), gone->buffer(0).size());
    }
  };
  ends.receive->add_pool(gone);
  ends.receive->add_pool(kept);
  REQUIRE(ends.connect());
  ends.send->post(kPeer, chunk(transfer_key(1, 0), endless_plan(), source));
  wait_for_byte(*gone, 0, kOld);
  ends.receive->remove_pool(0);
  REQUIRE(ends.send_log.wait_for<ChunkFailed>());
  const auto failed = ends.send_log.all<ChunkFailed>()[0];
  CHECK(failed.key == transfer_key(1, 0));
  CHECK(failed.error.code == Code::kEngineLost);
  ends.send->post(kPeer, chunk(transfer_key(2, 1), row_plan(kRows), source));
  REQUIRE(ends.send_log.wait_for<ChunkDone>());
  CHECK(all_bytes_are(kept->buffer(0), kOld));
  CHECK(all_bytes_are(gone->buffer(0), kMark));
  CHECK(ends.send_log.count<PeerDown>() == 0);
}

/// True when a chunk of transfer `generation` has been done or has failed.
bool answered(const EventLog::Events& events, Generation generation) {
  const TransferKey key = transfer_key(generation);
  return std::any_of(events.begin(), events.end(), [&key](const FabricEvent& event) {
    const auto* done = std::get_if<ChunkDone>(&event);
    const auto* failed = std::get_if<ChunkFailed>(&event);
    return (done != nullptr && done->key == key) || (failed != nullptr && failed->key == key);
  });
}

TEST_CASE("shm: bytes that went into a replaced pool never land") {
  const auto source = plain_pool(0, kRows / kPageRows, kOld);
  // Whether the sender hears of the new pool before or after its second chunk is up to the two threads;
  // either it fails the chunk, or the receiver refuses the notice.
  std::atomic<int> refusals{0};
  ShmEnds ends(small_slices(1));
  ends.on_send = [&](const FabricEvent& event) { refusals += std::holds_alternative<ChunkFailed>(event); };
  ends.on_receive = [&](const FabricEvent& event) {
    refusals += std::holds_alternative<fabric_event::Rejected>(event);
  };
  ends.receive->add_pool(plain_pool(0, kRows / kPageRows, std::byte{0}));
  REQUIRE(ends.connect());
  for (std::size_t round = 1; round <= 50; ++round) {
    ends.send->post(kPeer, chunk(transfer_key(round), row_plan(kRows), source));
    REQUIRE(ends.send_log.wait([round](const EventLog::Events& events) { return answered(events, round); }));
    ends.receive->add_pool(plain_pool(0, kRows / kPageRows, std::byte{0}));
    Grant grant;
    grant.key = transfer_key(round).grant;
    grant.pages = std::make_shared<const std::vector<std::uint32_t>>(1, 0);
    grant.sources.emplace_back(0, kPeer);
    ends.receive->open(grant);
    const int before = refusals;
    ends.send->post(kPeer, chunk(transfer_key(round), std::make_shared<const Plan>(), source, true));
    while (refusals == before) {
      std::this_thread::yield();
    }
    ends.send->cancel(kPeer, transfer_key(round));
    REQUIRE(ends.send_log.wait_for<Drained>(round));
  }
  CHECK(ends.receive_log.count<fabric_event::Landed>() == 0);
}

TEST_CASE("shm: ends can be destroyed while copies run") {
  const auto source = plain_pool(0, kRows / kPageRows, kOld);
  const auto destination = plain_pool(0, kRows / kPageRows, std::byte{0});
  for (int round = 0; round < 10; ++round) {
    std::memset(destination->buffer(0).data(), 0, destination->buffer(0).size());
    ShmEnds ends(small_slices(3));
    ends.receive->add_pool(destination);
    REQUIRE(ends.connect());
    ends.send->post(kPeer, chunk(transfer_key(1), endless_plan(), source));
    wait_for_byte(*destination, 0, kOld);
    if (round % 2 == 0) {
      ends.send.reset();
      std::memset(destination->buffer(0).data(), static_cast<int>(kMark), destination->buffer(0).size());
      CHECK(ends.receive_log.wait_for<PeerDown>());
      CHECK(all_bytes_are(destination->buffer(0), kMark));
    } else {
      ends.receive.reset();
      CHECK(ends.send_log.wait_for<PeerDown>());
    }
  }
}

}  // namespace
}  // namespace kvferry::test
