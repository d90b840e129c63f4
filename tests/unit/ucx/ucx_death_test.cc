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
  std::uint64_t size = 0;
  std::string json;
  if (read(offer_pipe, &size, sizeof(size)) == static_cast<ssize_t>(sizeof(size))) {
    json.resize(size);
  }
  if (json.empty() || read(offer_pipe, json.data(), size) != static_cast<ssize_t>(size)) {
    _exit(2);  // the test has ended without needing this child
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

/// Forked before any UCX thread exists in the test: a fork copies only the calling thread. Waits for its
/// offer.
class Child {
 public:
  Child(const UcxOptions& options, const FabricFixture& fixture) {
    int ends[2];
    if (pipe(ends) != 0 || (pid_ = fork()) < 0) {
      throw std::runtime_error("pipe or fork");
    }
    if (pid_ == 0) {
      ::close(ends[1]);
      send_until_killed(options, fixture, ends[0]);
    }
    ::close(ends[0]);
    offer_.reset(ends[1]);
  }
  ~Child() { end(); }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  void give(const std::string& offer) {
    // The next children hold copies of this end, so the length is what tells the offer's end.
    const std::uint64_t size = offer.size();
    REQUIRE(write(offer_.get(), &size, sizeof(size)) == static_cast<ssize_t>(sizeof(size)));
    REQUIRE(write(offer_.get(), offer.data(), offer.size()) == static_cast<ssize_t>(offer.size()));
  }
  void end() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
      pid_ = -1;
    }
  }

 private:
  pid_t pid_ = -1;
  UniqueFd offer_;
};

}  // namespace

TEST_CASE("senders killed in the middle of sending are PeerDown within seconds and the receiver serves on") {
  // Over shared memory a dead sender may leave its ring stuck (worker.h): often, not always, hence the
  // rounds.
  for (const auto& [options, rounds] : {std::pair(over_tcp(), 1), std::pair(over_shm(), 6)}) {
    INFO(to_string(options.transports));
    FabricFixture fixture(death_case());
    std::vector<std::unique_ptr<Child>> children;
    children.reserve(static_cast<std::size_t>(rounds));
    for (int i = 0; i < rounds; ++i) {
      children.push_back(std::make_unique<Child>(options, fixture));
    }
    EventLog log;
    const auto receive = take(UcxReceiveFabric::create(options, log.sink()));
    for (const auto& pool : fixture.destinations()) {
      receive->add_pool(pool);
    }
    for (RankIndex rank = 0; rank < fixture.destinations().size(); ++rank) {
      receive->open(fixture.grant(rank));
    }
    for (std::size_t round = 0; round < children.size(); ++round) {
      INFO("round " << round);
      const std::uint64_t before = receive->stats().blocks + receive->stats().discarded;
      children[round]->give(take(receive->offer(kPeer)).json);
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
      while (receive->stats().blocks + receive->stats().discarded < before + 100) {
        if (std::chrono::steady_clock::now() > deadline) {
          FAIL("the child sends nothing");
        }
        std::this_thread::yield();
      }
      children[round]->end();
      const auto begin = std::chrono::steady_clock::now();
      REQUIRE(log.wait_for<fabric_event::PeerDown>(round + 1));
      CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(15));
      CHECK(log.all<fabric_event::PeerDown>()[round].error.code == Code::kPeerLost);
    }
    CHECK(fixture.foreign_bytes() == "");
    EventLog send_log;
    const auto send = take(UcxSendFabric::create(options, send_log.sink()));
    send->connect(kPeer, take(receive->offer(kPeer)));
    CHECK(send_log.wait_for<fabric_event::PeerUp>());
  }
}

}  // namespace kvferry::test
