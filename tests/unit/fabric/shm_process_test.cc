// Two processes: addresses mean nothing between them, and the death of one is seen by the other.
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <catch2/catch.hpp>
#include <cstring>

#include "tests/unit/fabric/shm_support.h"

namespace kvferry::test {
namespace {

using fabric_event::PeerDown;

/// A pipe that carries one text each way; made before fork().
struct Pipe {
  Pipe() {
    int ends[2] = {-1, -1};
    KVF_CHECK(::pipe(ends) == 0);
    read_end.reset(ends[0]);
    write_end.reset(ends[1]);
  }
  void say(const std::string& text) {
    const std::uint32_t size = static_cast<std::uint32_t>(text.size());
    KVF_CHECK(::write(write_end.get(), &size, sizeof size) == sizeof size);
    KVF_CHECK(::write(write_end.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size()));
  }
  std::string hear() {
    std::uint32_t size = 0;
    KVF_CHECK(::read(read_end.get(), &size, sizeof size) == sizeof size);
    std::string text(size, '\0');
    for (std::size_t got = 0; got < size;) {
      const ssize_t more = ::read(read_end.get(), text.data() + got, size - got);
      KVF_CHECK(more > 0);
      got += static_cast<std::size_t>(more);
    }
    return text;
  }
  UniqueFd read_end;
  UniqueFd write_end;
};

/// Runs `body` in a child process, which leaves without running this program's exit handlers.
pid_t in_child(const std::function<void()>& body) {
  const pid_t child = ::fork();
  KVF_CHECK(child >= 0);
  if (child == 0) {
    body();
    ::_exit(0);
  }
  return child;
}

int wait_for_child(pid_t child) {
  int status = 0;
  KVF_CHECK(::waitpid(child, &status, 0) == child);
  return status;
}

std::string addresses(const FabricFixture& fixture) {
  std::string text;
  for (const auto& pool : fixture.destinations()) {
    text += fmt::format("{} ", static_cast<const void*>(pool->buffer(0).data()));
  }
  return text;
}

TEST_CASE("shm: pools at equal addresses in two processes are not confused") {
  // BL-49. Both processes build the same fixture from the same state, so their pools lie at equal addresses;
  // the child sends from its sources. Anything that took the parent's destination for its own memory would
  // write into the child's copy, and the parent's comparison of every byte would fail.
  const FabricCase spec = standard_cases()[1];
  Pipe to_child;
  Pipe to_parent;
  const pid_t child = in_child([&] {
    FabricFixture fixture(spec);
    to_parent.say(addresses(fixture));
    EventLog log;
    auto send = ShmSendFabric::create({}, log.sink());
    (*send)->connect(kPeer, FabricOffer{FabricKind::kShm, to_child.hear()});
    KVF_CHECK(log.wait_for<fabric_event::PeerUp>());
    std::size_t chunks = 0;
    for (const auto& pair : fixture.pairs()) {
      for (ChunkJob& job : fixture.jobs(pair)) {
        (*send)->post(kPeer, std::move(job));
        ++chunks;
      }
    }
    KVF_CHECK(log.wait_for<fabric_event::ChunkDone>(chunks));
  });
  FabricFixture fixture(spec);
  const std::string child_addresses = to_parent.hear();
  TempFolder folder;
  EventLog log;
  ShmReceiveOptions options;
  options.path = folder.socket();
  auto receive = ShmReceiveFabric::create(options, log.sink());
  REQUIRE(receive.has_value());
  for (RankIndex rank = 0; rank < fixture.destinations().size(); ++rank) {
    (*receive)->add_pool(fixture.destinations()[rank]);
    (*receive)->open(fixture.grant(rank));
  }
  to_child.say((*receive)->offer(kPeer)->json);
  CHECK(log.wait_for<fabric_event::Landed>(fixture.pairs().size()));
  CHECK(log.wait_for<PeerDown>());  // the child has ended
  CHECK(wait_for_child(child) == 0);
  CHECK(fixture.mismatch() == "");
#ifndef KVF_SANITIZED  // the sanitizers' own memory may lie elsewhere in the child
  CHECK(child_addresses == addresses(fixture));
#endif
}

TEST_CASE("shm: a prefill daemon that is killed while copying is down, and writes nothing after that") {
  constexpr std::byte kMark{0x7E};
  const auto destination = plain_pool(0, 64, std::byte{0});
  for (std::size_t round = 1; round <= 5; ++round) {
    std::memset(destination->buffer(0).data(), 0, destination->buffer(0).size());
    Pipe to_child;
    const pid_t child = in_child([&] {
      ShmSendOptions options;
      options.copy_threads = 2;
      EventLog log;
      const auto source = plain_pool(0, 64, std::byte{0x11});
      auto send = ShmSendFabric::create(options, log.sink());
      (*send)->connect(kPeer, FabricOffer{FabricKind::kShm, to_child.hear()});
      (*send)->post(kPeer, chunk(transfer_key(1), endless_plan(), source));
      ::pause();
    });
    TempFolder folder;
    EventLog log;
    ShmReceiveOptions options;
    options.path = folder.socket();
    auto receive = ShmReceiveFabric::create(options, [&](FabricEvent&& event) {
      if (std::holds_alternative<PeerDown>(event)) {
        std::memset(destination->buffer(0).data(), static_cast<int>(kMark), destination->buffer(0).size());
      }
      log.sink()(std::move(event));
    });
    REQUIRE(receive.has_value());
    (*receive)->add_pool(destination);
    to_child.say((*receive)->offer(kPeer)->json);
    wait_for_byte(*destination, 0, std::byte{0x11});
    REQUIRE(::kill(child, SIGKILL) == 0);
    REQUIRE(log.wait_for<PeerDown>());
    CHECK(log.all<PeerDown>()[0].error.code == Code::kPeerLost);
    wait_for_child(child);
    CHECK(all_bytes_are(destination->buffer(0), kMark));
  }
}

TEST_CASE("shm: a decode daemon that is killed is down for the prefill daemon, which lives on") {
  Pipe to_parent;
  TempFolder folder;
  const pid_t child = in_child([&] {
    ShmReceiveOptions options;
    options.path = folder.socket();
    EventLog log;
    auto receive = ShmReceiveFabric::create(options, log.sink());
    (*receive)->add_pool(plain_pool(0, 64, std::byte{0}));
    to_parent.say((*receive)->offer(kPeer)->json);
    ::pause();
  });
  EventLog log;
  auto send = ShmSendFabric::create({}, log.sink());
  REQUIRE(send.has_value());
  const FabricOffer offer{FabricKind::kShm, to_parent.hear()};
  (*send)->connect(kPeer, offer);
  REQUIRE(log.wait_for<fabric_event::PeerUp>());
  const auto source = plain_pool(0, 64, std::byte{0x11});
  (*send)->post(kPeer, chunk(transfer_key(1), endless_plan(), source));
  REQUIRE(::kill(child, SIGKILL) == 0);
  REQUIRE(log.wait_for<PeerDown>());
  CHECK(log.all<PeerDown>()[0].error.code == Code::kPeerLost);
  wait_for_child(child);
  // The next life of the decode daemon takes over the dead one's socket file.
  ShmReceiveOptions options;
  options.path = folder.socket();
  EventLog receive_log;
  auto receive = ShmReceiveFabric::create(options, receive_log.sink());
  REQUIRE(receive.has_value());
  (*send)->connect(kPeer, offer);
  REQUIRE(log.wait_for<PeerDown>(2));  // the old life's token
  (*send)->connect(kPeer, *(*receive)->offer(kPeer));
  CHECK(log.wait_for<fabric_event::PeerUp>(2));
}

}  // namespace
}  // namespace kvferry::test
