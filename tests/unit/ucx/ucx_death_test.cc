#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#include <catch2/catch.hpp>

#include <thread>

#include "tests/unit/ucx/ucx_rig.h"

namespace kvferry::test {
namespace {

FabricCase death_case() {
  FabricCase spec = standard_cases()[1];
  spec.model = small_mla(2);
  spec.pages = 128;
  spec.tokens = 2000;
  return spec;
}

/// The child: sends the same room for ever (the receiver discards what it has already) until it is killed.
[[noreturn]] void send_until_killed(const UcxOptions& options, const FabricFixture& fixture, int offer_pipe) {
  std::string json;
  char buffer[4096];
  for (ssize_t got = 0; (got = read(offer_pipe, buffer, sizeof(buffer))) > 0;) {
    json.append(buffer, static_cast<std::size_t>(got));
  }
  EventLog log;
  auto send = UcxSendFabric::create(options, log.sink());
  if (!send) {
    _exit(3);
  }
  (*send)->connect(kPeer, FabricOffer{FabricKind::kUcx, json});
  for (std::uint64_t room = 1;; ++room) {
    for (const auto& pair : fixture.pairs()) {
      for (auto& job : fixture.jobs(pair)) {
        job.last = false;
        (*send)->post(kPeer, std::move(job));
      }
    }
    log.wait_for<fabric_event::ChunkDone>(room);
  }
}

struct Child {
  pid_t pid = -1;
  int offer = -1;
  ~Child() {
    if (pid > 0) {
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
    }
  }
};

}  // namespace

TEST_CASE("a sender killed in the middle of sending is PeerDown within seconds and the receiver lives") {
  for (const auto& options : {over_tcp(), over_shm()}) {
    INFO(to_string(options.transports));
    FabricFixture fixture(death_case());
    int pipe_ends[2];
    REQUIRE(pipe(pipe_ends) == 0);
    Child child;
    // Before any UCX thread exists in this test: a fork copies only the calling thread.
    child.pid = fork();
    REQUIRE(child.pid >= 0);
    if (child.pid == 0) {
      ::close(pipe_ends[1]);
      send_until_killed(options, fixture, pipe_ends[0]);
    }
    ::close(pipe_ends[0]);
    EventLog log;
    const auto receive = take(UcxReceiveFabric::create(options, log.sink()));
    for (const auto& pool : fixture.destinations()) {
      receive->add_pool(pool);
    }
    for (RankIndex rank = 0; rank < fixture.destinations().size(); ++rank) {
      receive->open(fixture.grant(rank));
    }
    const auto offer = take(receive->offer(kPeer));
    REQUIRE(write(pipe_ends[1], offer.json.data(), offer.json.size()) ==
            static_cast<ssize_t>(offer.json.size()));
    ::close(pipe_ends[1]);
    while (receive->stats().blocks < 100) {
      std::this_thread::yield();
    }
    REQUIRE(kill(child.pid, SIGKILL) == 0);
    REQUIRE(waitpid(child.pid, nullptr, 0) == child.pid);
    child.pid = -1;
    const auto begin = std::chrono::steady_clock::now();
    REQUIRE(log.wait_for<fabric_event::PeerDown>());
    CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(15));
    CHECK(log.all<fabric_event::PeerDown>()[0].error.code == Code::kPeerLost);
    CHECK(fixture.foreign_bytes() == "");
    // Alive: a new sender connects to the same fabric.
    EventLog send_log;
    const auto send = take(UcxSendFabric::create(options, send_log.sink()));
    send->connect(kPeer, take(receive->offer(kPeer)));
    CHECK(send_log.wait_for<fabric_event::PeerUp>());
  }
}

}  // namespace kvferry::test
