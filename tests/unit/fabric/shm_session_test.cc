// Who may connect, what a chunk may name, and when its pool may come.
#include <sys/stat.h>

#include <catch2/catch.hpp>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/unit/fabric/shm_support.h"
#include "transport/shm/listen_socket.h"

namespace kvferry::test {
namespace {

using Catch::Matchers::Contains;
using fabric_event::ChunkDone;
using fabric_event::ChunkFailed;
using fabric_event::Drained;
using fabric_event::PeerDown;
using fabric_event::Rejected;

Error connect_fails(ShmEnds& ends, const FabricOffer& offer) {
  const std::size_t before = ends.send_log.count<PeerDown>();
  ends.send->connect(kPeer, offer);
  KVF_CHECK(ends.send_log.wait_for<PeerDown>(before + 1));
  return ends.send_log.all<PeerDown>()[before].error;
}

FabricOffer changed(const FabricOffer& offer, const char* field, const nlohmann::json& value) {
  nlohmann::json json = nlohmann::json::parse(offer.json);
  json[field] = value;
  return FabricOffer{FabricKind::kShm, json.dump()};
}

TEST_CASE("shm: a wrong token is refused on both sides and the right one still works") {
  ShmEnds ends;
  const FabricOffer offer = *ends.receive->offer(kPeer);
  const Error error = connect_fails(ends, changed(offer, "token", std::string(32, '0')));
  CHECK(error.code == Code::kUnauthorized);
  CHECK_THAT(error.message, Contains("token"));
  REQUIRE(ends.receive_log.wait_for<Rejected>());
  CHECK(ends.receive_log.all<Rejected>()[0].peer == 0);
  ends.send->connect(kPeer, offer);
  CHECK(ends.send_log.wait_for<fabric_event::PeerUp>());
}

TEST_CASE("shm: a pool has writers for as long as a prefill side has it mapped") {
  ShmEnds ends;
  FabricFixture fixture(standard_cases()[0]);
  const auto writers = [&] {
    std::size_t seen = 0;
    for (const auto& pool : fixture.destinations()) {
      for (const UniqueFd& fd : pool->fds()) {
        const auto answer = has_writers(fd.get());
        REQUIRE(answer);
        seen += *answer ? 1 : 0;
      }
    }
    return seen;
  };
  CHECK(writers() == 0);
  REQUIRE(fixture.connect(*ends.send, ends.send_log, *ends.receive).empty());
  CHECK(writers() == 2 * fixture.destinations().size());
  ends.send.reset();
  CHECK(writers() == 0);
}

TEST_CASE("shm: a token is good for one session, and a new offer replaces an unused one") {
  ShmEnds ends;
  const FabricOffer first = *ends.receive->offer(kPeer);
  const FabricOffer second = *ends.receive->offer(kPeer);
  CHECK(connect_fails(ends, first).code == Code::kUnauthorized);
  ends.send->connect(kPeer, second);
  REQUIRE(ends.send_log.wait_for<fabric_event::PeerUp>());
  ends.send->connect(kPeer + 1, second);
  REQUIRE(ends.send_log.wait_for<PeerDown>(2));
  CHECK(ends.send_log.all<PeerDown>()[1].peer == kPeer + 1);
  CHECK(ends.send_log.all<PeerDown>()[1].error.code == Code::kUnauthorized);
}

TEST_CASE("shm: a token that was fenced before its use is forgotten") {
  ShmEnds ends;
  const FabricOffer offer = *ends.receive->offer(kPeer);
  ends.receive->fence(kPeer);
  CHECK(connect_fails(ends, offer).code == Code::kUnauthorized);
  CHECK(ends.receive_log.count<PeerDown>() == 0);
}

TEST_CASE("shm: another host, another life of the daemon and a path without daemon are told apart") {
  ShmEnds ends;
  const FabricOffer offer = *ends.receive->offer(kPeer);
  CHECK_THAT(connect_fails(ends, changed(offer, "host_id", "elsewhere")).message, Contains("another host"));
  CHECK(connect_fails(ends, changed(offer, "path", ends.folder.socket() + "x")).code == Code::kUnavailable);
  CHECK(connect_fails(ends, changed(offer, "path", "relative")).code == Code::kInvalid);
  CHECK(connect_fails(ends, changed(offer, "path", 5)).code == Code::kProtocol);
  CHECK(connect_fails(ends, FabricOffer{FabricKind::kTcp, offer.json}).code == Code::kInvalid);
  CHECK(connect_fails(ends, FabricOffer{FabricKind::kShm, "{"}).code == Code::kProtocol);
  const Error error = connect_fails(ends, changed(offer, "epoch", "0123456789abcdef"));
  CHECK(error.code == Code::kProtocol);
  CHECK_THAT(error.message, Contains("epoch") && Contains("0123456789abcdef"));
}

TEST_CASE("shm: only listed users are let in, on either side") {
  const uid_t other = ::geteuid() + 1;
  ShmReceiveOptions strict_receive;
  strict_receive.allowed_uids = {other};
  ShmEnds guarded({}, strict_receive);
  const Error refused = connect_fails(guarded, *guarded.receive->offer(kPeer));
  CHECK(refused.code == Code::kUnauthorized);
  CHECK_THAT(refused.message,
             Contains("uid " + std::to_string(::geteuid())) && Contains(std::to_string(other)));
  CHECK(guarded.receive_log.wait_for<Rejected>());

  ShmSendOptions strict_send;
  strict_send.allowed_uids = {other};
  ShmEnds wary(strict_send);
  CHECK(connect_fails(wary, *wary.receive->offer(kPeer)).code == Code::kUnauthorized);

  ShmReceiveOptions open_receive;
  open_receive.allowed_uids = {other, ::geteuid()};
  ShmEnds open({}, open_receive);
  CHECK(open.connect());
}

TEST_CASE("shm: a connection without hello is dropped after its time") {
  ShmReceiveOptions options;
  options.hello_wait = std::chrono::milliseconds(20);
  ShmEnds ends({}, options);
  auto silent = shm::connect_unix(ends.folder.socket());
  REQUIRE(silent.has_value());
  REQUIRE(ends.receive_log.wait_for<Rejected>());
  CHECK(ends.receive_log.all<Rejected>()[0].error.code == Code::kDeadline);
}

TEST_CASE(
    "shm: the socket file is private, replaces a dead one, and leaves living ones and other files alone") {
  TempFolder folder;
  ShmReceiveOptions options;
  options.path = folder.socket();
  const FabricSink sink = [](FabricEvent&&) {};
  {
    auto first = ShmReceiveFabric::create(options, sink);
    REQUIRE(first.has_value());
    struct stat status {};
    REQUIRE(::lstat(folder.socket().c_str(), &status) == 0);
    CHECK(S_ISSOCK(status.st_mode));
    CHECK((status.st_mode & 0777) == 0600);
    const auto second = ShmReceiveFabric::create(options, sink);
    REQUIRE_FALSE(second.has_value());
    CHECK(second.error().code == Code::kConflict);
  }
  struct stat status {};
  CHECK(::lstat(folder.socket().c_str(), &status) != 0);
  {
    // A file nobody listens on: a socket that was bound and closed without being unlinked.
    auto dead = shm::ListenSocket::open(folder.socket(), 0600);
    REQUIRE(dead.has_value());
    const std::string moved = folder.socket() + ".moved";
    REQUIRE(::rename(folder.socket().c_str(), moved.c_str()) == 0);
    *dead = shm::ListenSocket();
    REQUIRE(::rename(moved.c_str(), folder.socket().c_str()) == 0);
    CHECK(ShmReceiveFabric::create(options, sink).has_value());
  }
  std::ofstream(folder.socket()) << "precious";
  const auto taken = ShmReceiveFabric::create(options, sink);
  REQUIRE_FALSE(taken.has_value());
  CHECK(taken.error().code == Code::kConflict);
  CHECK(::lstat(folder.socket().c_str(), &status) == 0);
  options.path = "/" + std::string(200, 'x');
  CHECK(ShmReceiveFabric::create(options, sink).error().code == Code::kInvalid);
}

TEST_CASE("shm: a chunk may overtake its pool, and later chunks keep their order") {
  ShmEnds ends;
  const auto source = plain_pool(0, 8, std::byte{0x11});
  const auto destination = plain_pool(3, 8, std::byte{0});
  REQUIRE(ends.connect());
  ChunkJob first = chunk(transfer_key(1, 3), row_plan(16), source);
  first.ticket = 1;
  ChunkJob second = chunk(transfer_key(1, 3), row_plan(32), source);
  second.ticket = 2;
  ends.send->post(kPeer, std::move(first));
  ends.send->post(kPeer, std::move(second));
  ends.receive->add_pool(destination);
  REQUIRE(ends.send_log.wait_for<ChunkDone>(2));
  CHECK(ends.send_log.all<ChunkDone>()[0].ticket == 1);
  CHECK(ends.send_log.all<ChunkDone>()[1].ticket == 2);
  CHECK(all_bytes_are(destination->buffer(0).first(32 * kRowBytes), std::byte{0x11}));
}

TEST_CASE("shm: a chunk whose pool never comes fails, and so do the later ones until cancel") {
  ShmSendOptions options;
  options.pool_wait = std::chrono::milliseconds(20);
  ShmEnds ends(options);
  const auto source = plain_pool(0, 8, std::byte{0x11});
  REQUIRE(ends.connect());
  ends.send->post(kPeer, chunk(transfer_key(1), row_plan(16), source));
  REQUIRE(ends.send_log.wait_for<ChunkFailed>(1));
  CHECK(ends.send_log.all<ChunkFailed>()[0].error.code == Code::kNotFound);
  ends.receive->add_pool(plain_pool(0, 8, std::byte{0}));
  ends.send->post(kPeer, chunk(transfer_key(1), row_plan(16), source, true));
  REQUIRE(ends.send_log.wait_for<ChunkFailed>(2));
  ends.send->cancel(kPeer, transfer_key(1));
  REQUIRE(ends.send_log.wait_for<Drained>());
  CHECK(ends.send_log.count<ChunkDone>() == 0);
}

TEST_CASE("shm: what does not fit the destination pool is refused with both values and copies nothing") {
  ShmEnds ends;
  const auto source = plain_pool(0, 64, std::byte{0x11});
  const auto destination = plain_pool(0, 8, std::byte{0});
  ends.receive->add_pool(destination);
  REQUIRE(ends.connect());
  std::size_t posted = 0;
  const auto refusal = [&](const std::function<void(Plan&, ChunkJob&)>& change) {
    Plan plan = *row_plan(16);
    ChunkJob job = chunk(transfer_key(++posted), nullptr, source);
    change(plan, job);
    job.plan = std::make_shared<const Plan>(plan);
    ends.send->post(kPeer, std::move(job));
    KVF_CHECK(ends.send_log.wait_for<ChunkFailed>(posted));
    return ends.send_log.all<ChunkFailed>()[posted - 1].error;
  };
  const Error beyond = refusal([](Plan& plan, ChunkJob&) { plan.runs[0].dst_row = 8 * kPageRows - 15; });
  CHECK(beyond.code == Code::kInvalid);
  CHECK_THAT(beyond.message, Contains("9 pages needed") && Contains("limit 8"));
  const Error strided = refusal([](Plan& plan, ChunkJob&) {
    plan.runs[0].count = 3;
    plan.runs[0].dst_step = 0xFFFFFFFF;
  });
  CHECK_THAT(strided.message, Contains("limit 8"));
  refusal([](Plan& plan, ChunkJob&) { plan.runs[0].dst_row = ~std::uint64_t{0} - 3; });
  refusal([](Plan& plan, ChunkJob&) { plan.runs[0].rows = 0; });
  refusal([](Plan& plan, ChunkJob&) { plan.pairs[0].dst_buffer = 1; });
  refusal([](Plan& plan, ChunkJob&) { plan.pairs[0].dst_offset = 1; });
  refusal([](Plan& plan, ChunkJob&) { plan.pairs[0].dst_row_bytes = 2 * kRowBytes; });
  refusal([](Plan& plan, ChunkJob&) { plan.runs[0].src_row = 64 * kPageRows; });
  refusal([](Plan& plan, ChunkJob&) { plan.pairs[0].src_offset = 0xFFFFFFFF; });
  const Error aux = refusal([](Plan&, ChunkJob& job) {
    job.last = true;
    job.aux.push_back(AuxWrite{0, std::vector<std::byte>(8)});
  });
  CHECK_THAT(aux.message, Contains("aux field 0"));
  CHECK(all_bytes_are(destination->buffer(0), std::byte{0}));
  CHECK(ends.send_log.count<ChunkDone>() == 0);
}

TEST_CASE("shm: above jobs_max a chunk is refused and what was accepted is kept") {
  ShmSendOptions options;
  options.jobs_max = 2;
  ShmEnds ends(options);
  const auto source = plain_pool(0, 8, std::byte{0x11});
  REQUIRE(ends.connect());
  for (Generation generation = 1; generation <= 3; ++generation) {
    ends.send->post(kPeer, chunk(transfer_key(generation), row_plan(16), source));
  }
  REQUIRE(ends.send_log.wait_for<ChunkFailed>());
  CHECK(ends.send_log.all<ChunkFailed>()[0].key == transfer_key(3));
  CHECK(ends.send_log.all<ChunkFailed>()[0].error.code == Code::kExhausted);
  ends.receive->add_pool(plain_pool(0, 8, std::byte{0}));
  CHECK(ends.send_log.wait_for<ChunkDone>(2));
}

TEST_CASE("shm: posting to a peer that was never connected fails, options out of range are refused") {
  ShmEnds ends;
  ends.send->post(5, chunk(transfer_key(1), row_plan(1), plain_pool(0, 1, std::byte{0})));
  REQUIRE(ends.send_log.wait_for<ChunkFailed>());
  CHECK(ends.send_log.all<ChunkFailed>()[0].error.code == Code::kUnavailable);
  ends.send->fence(5);
  ends.receive->fence(5);
  ShmSendOptions options;
  options.copy_threads = 0;
  CHECK(ShmSendFabric::create(options, [](FabricEvent&&) {}).error().code == Code::kInvalid);
}

TEST_CASE("shm: connecting a connected peer ends the old session first") {
  ShmEnds ends;
  ends.receive->add_pool(plain_pool(0, 8, std::byte{0}));
  REQUIRE(ends.connect());
  // The receiver admits a second session of one peer only after the first has ended; the sender sees to it.
  const FabricOffer again = *ends.receive->offer(kPeer);
  ends.send->connect(kPeer, again);
  REQUIRE(ends.send_log.wait([](const EventLog::Events& events) {
    return EventLog::count<fabric_event::PeerUp>(events) == 2 || EventLog::count<PeerDown>(events) == 2;
  }));
  CHECK(std::holds_alternative<PeerDown>(ends.send_log.events()[1]));
  CHECK(ends.send_log.count<fabric_event::PeerUp>() == 2);
}

}  // namespace
}  // namespace kvferry::test
