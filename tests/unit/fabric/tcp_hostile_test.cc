#include "tests/unit/fabric/tcp_support.h"

using namespace kvferry;
using namespace kvferry::test;

namespace {

/// A receiver with grants for all decode ranks, and a bare socket that was admitted as kPeer.
struct Target {
  explicit Target(const TcpReceiveConfig& config = {}) : fixture(spec()), receive(make_receive(log, config)) {
    for (const auto& pool : fixture.destinations()) {
      receive->add_pool(pool);
    }
    for (RankIndex rank = 0; rank < fixture.destinations().size(); ++rank) {
      receive->open(fixture.grant(rank));
    }
    offer = receive->offer(kPeer).value();
  }
  static FabricCase spec() {
    FabricCase spec = standard_cases()[0];
    spec.tokens = 64;
    return spec;
  }
  /// A legal block of one row of the first pair.
  BlockHeader row(std::uint64_t index) const {
    BlockHeader h;
    h.key = fixture.key(fixture.pairs().front());
    h.dst_index = index;
    h.rows = 1;
    h.count = 1;
    h.step = 1;
    h.row_bytes = 1152;
    h.payload_bytes = 1152;
    return h;
  }
  bool untouched() const {
    return std::all_of(fixture.destinations().begin(), fixture.destinations().end(),
                       [](const auto& pool) { return all_guard(*pool); });
  }

  FabricFixture fixture;
  EventLog log;
  std::unique_ptr<TcpReceiveFabric> receive;
  FabricOffer offer;
};

}  // namespace

TEST_CASE("a wrong token is refused without an answer and the process serves on") {
  Target target;
  FabricOffer wrong = to_fabric_offer(TcpOffer{"127.0.0.1", target.receive->port(), TcpToken{}});
  RawPeer peer(target.receive->port());
  CHECK_FALSE(peer.greet(wrong));
  REQUIRE(target.log.wait_for<fabric_event::Rejected>());
  CHECK(target.log.all<fabric_event::Rejected>().front().peer == 0);
  CHECK(target.log.all<fabric_event::Rejected>().front().error.code == Code::kUnauthorized);
  CHECK(target.receive->counters().strangers == 1);

  EventLog send_log;
  auto send = make_send(send_log);
  send->connect(kPeer, wrong);
  REQUIRE(send_log.wait_for<fabric_event::PeerDown>());
  CHECK(send_log.count<fabric_event::PeerUp>() == 0);

  RawPeer good(target.receive->port());
  CHECK(good.greet(target.offer));
}

TEST_CASE("garbage before or after the hello closes the connection and changes nothing") {
  for (const bool greeted : {false, true}) {
    Target target;
    RawPeer peer(target.receive->port());
    if (greeted) {
      REQUIRE(peer.greet(target.offer));
    }
    peer.write(4096, std::byte{0x47});
    CHECK(peer.is_closed_by_peer());
    REQUIRE(target.log.wait_for<fabric_event::Rejected>());
    if (greeted) {
      REQUIRE(target.log.wait_for<fabric_event::PeerDown>());
    }
    CHECK(target.untouched());
  }
}

TEST_CASE("a stranger who says nothing, or half a hello, is closed after the deadline") {
  TcpReceiveConfig config;
  config.hello_deadline = 20'000'000;
  Target target(config);
  RawPeer silent(target.receive->port());
  RawPeer slow(target.receive->port());
  slow.write(5, std::byte{'K'});
  CHECK(silent.is_closed_by_peer());
  CHECK(slow.is_closed_by_peer());
  CHECK(target.receive->counters().strangers == 2);
}

TEST_CASE("above the limit the oldest stranger goes, and a peer still gets in") {
  TcpReceiveConfig config;
  config.strangers_max = 4;
  Target target(config);
  std::vector<std::unique_ptr<RawPeer>> strangers;
  strangers.reserve(9);
  for (int i = 0; i < 9; ++i) {
    strangers.push_back(std::make_unique<RawPeer>(target.receive->port()));
  }
  CHECK(strangers[0]->is_closed_by_peer());
  CHECK(strangers[4]->is_closed_by_peer());
  RawPeer good(target.receive->port());
  CHECK(good.greet(target.offer));
}

TEST_CASE("a stream that was opened already is refused") {
  Target target;
  RawPeer first(target.receive->port());
  REQUIRE(first.greet(target.offer, 0, 2));
  RawPeer again(target.receive->port());
  CHECK_FALSE(again.greet(target.offer, 0, 2));
  RawPeer other_count(target.receive->port());
  CHECK_FALSE(other_count.greet(target.offer, 1, 3));
  RawPeer second(target.receive->port());
  CHECK(second.greet(target.offer, 1, 2));
  CHECK(first.sync(target.row(0).key));
}

TEST_CASE("a block outside its grant is refused and changes nothing") {
  // The cases of a published crash where an address from the wire was used unchecked, as far as this wire can
  // say them: there is no address in a block, only granted rows, a buffer and a slice.
  const std::vector<std::pair<const char*, void (*)(BlockHeader&)>> cases = {
      {"one row past the grant", [](BlockHeader& h) { h.dst_index = 64; }},
      {"two rows from the last",
       [](BlockHeader& h) {
         h.dst_index = 63;
         h.rows = h.step = 2;
         h.payload_bytes *= 2;
       }},
      {"index 2^31", [](BlockHeader& h) { h.dst_index = std::uint64_t{1} << 31; }},
      {"index 2^32", [](BlockHeader& h) { h.dst_index = std::uint64_t{1} << 32; }},
      {"index 2^63", [](BlockHeader& h) { h.dst_index = std::uint64_t{1} << 63; }},
      {"index wraps around", [](BlockHeader& h) { h.dst_index = ~std::uint64_t{0}; }},
      {"index times row bytes wraps to 0", [](BlockHeader& h) { h.dst_index = std::uint64_t{1} << 57; }},
      {"payload of 2^63 bytes", [](BlockHeader& h) { h.payload_bytes = std::uint64_t{1} << 63; }},
      {"4 Gi rows",
       [](BlockHeader& h) {
         h.rows = h.step = ~0u;
         h.payload_bytes = std::uint64_t{~0u} * 1152;
       }},
      {"pieces that leave the grant",
       [](BlockHeader& h) {
         h.count = 2;
         h.step = 64;
         h.payload_bytes *= 2;
       }},
      {"buffer that does not exist", [](BlockHeader& h) { h.target = 3; }},
      {"slice past the row", [](BlockHeader& h) { h.row_offset = 1; }},
      {"row longer than a row",
       [](BlockHeader& h) {
         h.row_bytes = 1153;
         h.payload_bytes = 1153;
       }},
      {"source that was not granted", [](BlockHeader& h) { h.key.prefill_rank = 77; }},
      {"aux field that does not exist",
       [](BlockHeader& h) {
         h.type = BlockType::kAux;
         h.target = 9;
         h.dst_index = 2;
         h.row_bytes = 8;
         h.payload_bytes = 8;
       }},
      {"aux slot of another room",
       [](BlockHeader& h) {
         h.type = BlockType::kAux;
         h.dst_index = 1;
         h.row_bytes = 8;
         h.payload_bytes = 8;
       }},
      {"aux longer than its field",
       [](BlockHeader& h) {
         h.type = BlockType::kAux;
         h.dst_index = 2;
         h.row_bytes = 9;
         h.payload_bytes = 9;
       }},
  };
  for (const auto& [name, change] : cases) {
    INFO(name);
    Target target;
    RawPeer peer(target.receive->port());
    REQUIRE(peer.greet(target.offer));
    BlockHeader header = target.row(0);
    change(header);
    peer.write(header);
    peer.write(4096, std::byte{0x66});
    CHECK(peer.is_closed_by_peer());
    REQUIRE(target.log.wait_for<fabric_event::PeerDown>());
    REQUIRE(target.log.count<fabric_event::Rejected>() == 1);
    CHECK(target.log.all<fabric_event::Rejected>().front().peer == kPeer);
    CHECK(target.log.all<fabric_event::PeerDown>().front().peer == kPeer);
    CHECK(target.receive->counters().violations == 1);
    CHECK(target.untouched());
  }
}

TEST_CASE("a legal block next to the refused ones does land") {
  // So that the cases above fail for their own reason.
  Target target;
  RawPeer peer(target.receive->port());
  REQUIRE(peer.greet(target.offer));
  peer.write(target.row(63));
  peer.write(1152, std::byte{0x66});
  CHECK(peer.sync(target.row(0).key));
  CHECK_FALSE(target.untouched());
}

TEST_CASE("a peer cannot write into the grant of another peer") {
  Target target;
  const FabricOffer other = target.receive->offer(kPeer + 1).value();
  RawPeer thief(target.receive->port());
  REQUIRE(thief.greet(other));
  thief.write(target.row(0));
  thief.write(1152, std::byte{0x66});
  CHECK(thief.is_closed_by_peer());
  REQUIRE(target.log.wait_for<fabric_event::PeerDown>());
  CHECK(target.log.all<fabric_event::PeerDown>().front().peer == kPeer + 1);
  CHECK(target.untouched());
  RawPeer owner(target.receive->port());
  CHECK(owner.greet(target.offer));
}

TEST_CASE("blocks of closed, unknown and earlier grants are read past and counted") {
  Target target;
  RawPeer peer(target.receive->port());
  REQUIRE(peer.greet(target.offer));
  const BlockHeader good = target.row(0);
  target.receive->close(good.key.grant);
  REQUIRE(target.log.wait_for<fabric_event::GrantClosed>());
  BlockHeader old = good;
  old.key.grant.generation -= 1;
  BlockHeader unknown = good;
  unknown.key.grant.room += 1;
  for (const BlockHeader& header : {good, old, unknown}) {
    peer.write(header);
    peer.write(1152, std::byte{0x66});
  }
  peer.write(make_notice(good.key, 1152, 1));
  CHECK(peer.sync(good.key));  // the connection lives
  CHECK(target.untouched());
  CHECK(target.log.count<fabric_event::Landed>() == 0);
  CHECK(target.receive->counters().discarded_blocks == 4);
  CHECK(target.receive->counters().discarded_bytes == 3 * 1152);
  CHECK(target.log.count<fabric_event::PeerDown>() == 0);
}

TEST_CASE("a flood of late blocks is counted but not reported block by block") {
  Target target;
  RawPeer peer(target.receive->port());
  REQUIRE(peer.greet(target.offer));
  BlockHeader late = target.row(0);
  late.key.grant.generation -= 1;
  for (int i = 0; i < 1000; ++i) {
    peer.write(late);
    peer.write(1152, std::byte{0x66});
  }
  CHECK(peer.sync(late.key));
  CHECK(target.receive->counters().discarded_blocks == 1000);
  CHECK(target.log.count<fabric_event::Rejected>() < 200);
}

TEST_CASE("pages are safe to reuse after close, also in the middle of a block") {
  Target target;
  RawPeer peer(target.receive->port());
  REQUIRE(peer.greet(target.offer));
  BlockHeader block = target.row(0);
  block.rows = block.step = 32;
  block.payload_bytes *= 32;
  SECTION("rows received in place") {}
  SECTION("small pieces through the buffer") {
    block.row_bytes = 64;
    block.row_offset = 128;
    block.payload_bytes = 32 * 64;
  }
  // Half of the block is there before the close, the other half comes after it.
  peer.write(block);
  peer.write(block.payload_bytes / 2, std::byte{0x66});
  const auto& pool = *target.fixture.destinations()[0];
  // Another peer's round trip: the receiver's thread has read what was there before it.
  const FabricOffer other = target.receive->offer(kPeer + 1).value();
  RawPeer probe(target.receive->port());
  REQUIRE(probe.greet(other));
  REQUIRE(probe.sync(block.key));
  target.receive->close(block.key.grant);
  REQUIRE(target.log.wait_for<fabric_event::GrantClosed>());
  fill_guard(pool);
  peer.write(block.payload_bytes - block.payload_bytes / 2, std::byte{0x66});
  peer.write(make_notice(block.key, block.payload_bytes, 1));
  CHECK(peer.sync(block.key));  // the stream is still in step
  CHECK(target.untouched());
  CHECK(target.log.count<fabric_event::Landed>() == 0);
  CHECK(target.receive->counters().discarded_blocks >= 1);
}

TEST_CASE("a peer that dies within a block is reported once and lands nothing") {
  for (const bool reset : {false, true}) {
    Target target;
    RawPeer peer(target.receive->port());
    REQUIRE(peer.greet(target.offer));
    BlockHeader block = target.row(0);
    block.rows = block.step = 32;
    block.payload_bytes *= 32;
    peer.write(block);
    peer.write(5000, std::byte{0x66});
    reset ? peer.reset() : peer.close();
    REQUIRE(target.log.wait_for<fabric_event::PeerDown>());
    CHECK(target.log.all<fabric_event::PeerDown>().front().error.code == Code::kPeerLost);
    CHECK(target.log.count<fabric_event::Landed>() == 0);
    // Its token is used up.
    RawPeer again(target.receive->port());
    CHECK_FALSE(again.greet(target.offer));
    target.receive.reset();
    CHECK(target.log.count<fabric_event::PeerDown>() == 1);
  }
}

TEST_CASE("a fence closes the peer's connection and forgets its token") {
  Target target;
  RawPeer peer(target.receive->port());
  REQUIRE(peer.greet(target.offer));
  target.receive->fence(kPeer);
  REQUIRE(target.log.wait_for<fabric_event::PeerDown>());
  CHECK(peer.is_closed_by_peer());
  RawPeer again(target.receive->port());
  CHECK_FALSE(again.greet(target.offer));
}

TEST_CASE("a fence of a peer that never came forgets its token silently") {
  Target target;
  target.receive->fence(kPeer);
  RawPeer peer(target.receive->port());
  CHECK_FALSE(peer.greet(target.offer));
  CHECK(target.log.count<fabric_event::PeerDown>() == 0);
}

TEST_CASE("a grant that cannot be opened is reported") {
  Target target;
  Grant grant = target.fixture.grant(0);
  grant.key.room += 1;
  grant.key.decode_rank = 99;
  target.receive->open(grant);
  REQUIRE(target.log.wait_for<fabric_event::Rejected>());
  CHECK(target.log.all<fabric_event::Rejected>().front().error.code == Code::kNotFound);
}

TEST_CASE("a sender that asks for answers and never reads them stops being read") {
  Target target;
  RawPeer peer(target.receive->port());
  REQUIRE(peer.greet(target.offer));
  // Far more answers than the sockets hold: the receiver must stop reading instead of queueing them.
  const timeval soon = {0, 200'000};
  ::setsockopt(peer.fd(), SOL_SOCKET, SO_SNDTIMEO, &soon, sizeof soon);
  std::vector<std::byte> drains;
  for (int i = 0; i < 1000; ++i) {
    BlockBytes bytes;
    encode_block(make_drain(target.row(0).key), bytes);
    drains.insert(drains.end(), bytes.begin(), bytes.end());
  }
  bool stuck = false;
  for (int i = 0; i < 2000 && !stuck; ++i) {
    stuck = !peer.write(std::span<const std::byte>(drains));
  }
  CHECK(stuck);
  const FabricOffer other = target.receive->offer(kPeer + 1).value();
  RawPeer next(target.receive->port());
  CHECK(next.greet(other));
}
