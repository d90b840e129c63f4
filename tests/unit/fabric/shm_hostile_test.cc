// What a broken or malicious daemon says over the socket is refused by name and harms neither process. The
// other daemon is played by the test, frame by frame.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <catch2/catch.hpp>
#include <future>
#include <optional>

#include "common/base/boot_id.h"
#include "common/base/hex.h"
#include "tests/support/rng.h"
#include "tests/unit/fabric/shm_support.h"
#include "transport/shm/channel.h"
#include "transport/shm/listen_socket.h"
#include "transport/shm/message.h"

namespace kvferry::test {
namespace {

using Catch::Matchers::Contains;
using fabric_event::ChunkFailed;
using fabric_event::Landed;
using fabric_event::PeerDown;
using fabric_event::PeerUp;
using fabric_event::Rejected;

constexpr shm::ChannelLimits kRoomy{
    .frame_bytes_max = 4 << 20, .descriptors_max = 4096, .queued_frames_max = 99};

/// A send end that is really this test.
struct FakeSender {
  explicit FakeSender(ShmEnds& ends, PeerId peer = kPeer)
      : offer(*shm::parse_offer(ends.receive->offer(peer)->json)),
        channel(*shm::connect_unix(offer.path), kRoomy) {}
  void say(const std::string& text) {
    KVF_CHECK(channel.send(text).has_value() && channel.flush().has_value() && !channel.wants_write());
  }
  void hello() { say(shm::to_text(shm::Hello{offer.token})); }
  /// The first frame that comes, before the other end closes.
  std::string hears() {
    std::vector<std::string> frames;
    while (frames.empty() && channel.receive(frames).value_or(false)) {
      std::this_thread::yield();
    }
    return frames.empty() ? "" : frames.front();
  }
  shm::Offer offer;
  shm::Channel channel;
};

Grant open_grant(ShmEnds& ends, Generation generation) {
  Grant grant;
  grant.key = transfer_key(generation).grant;
  grant.pages = std::make_shared<const std::vector<std::uint32_t>>(1, 0);
  grant.sources.emplace_back(0, kPeer);
  ends.receive->open(grant);
  return grant;
}

TEST_CASE("shm: a notice lands once, for an open grant, from its source and for the pool of today") {
  ShmEnds ends;
  ends.receive->add_pool(plain_pool(0, 4, std::byte{0}));  // serial 1
  open_grant(ends, 1);
  open_grant(ends, 2);
  FakeSender sender(ends);
  sender.hello();
  const auto rejected = [&](const shm::Notice& notice) {
    const std::size_t before = ends.receive_log.count<Rejected>();
    sender.say(shm::to_text(notice));
    KVF_CHECK(ends.receive_log.wait_for<Rejected>(before + 1));
    return ends.receive_log.all<Rejected>()[before];
  };
  CHECK(rejected({transfer_key(1), 2, 100, 1}).error.code == Code::kNotFound);     // another pool
  CHECK(rejected({transfer_key(3), 1, 100, 1}).error.code == Code::kNotFound);     // no grant
  CHECK(rejected({transfer_key(1, 5), 1, 100, 1}).error.code == Code::kNotFound);  // no such rank
  CHECK(rejected({transfer_key(1, 0, 5), 1, 100, 1}).peer == kPeer);               // not a source
  sender.say(shm::to_text(shm::Notice{transfer_key(1), 1, 100, 3}));
  REQUIRE(ends.receive_log.wait_for<Landed>());
  CHECK(ends.receive_log.all<Landed>()[0].bytes == 100);
  rejected({transfer_key(1), 1, 100, 3});
  ends.receive->close(transfer_key(2).grant);
  REQUIRE(ends.receive_log.wait_for<fabric_event::GrantClosed>());
  CHECK(rejected({transfer_key(2), 1, 0, 0}).error.code == Code::kNotFound);
  CHECK(ends.receive_log.count<Landed>() == 1);
  CHECK(ends.receive_log.count<PeerDown>() == 0);
}

TEST_CASE("shm: a notice is never judged before the grant that was opened before it") {
  // Notices stream in while grants are opened one by one; each notice is sent after its open() has returned,
  // and so must land, however the receiver's thread interleaves its mailbox and its socket.
  ShmEnds ends;
  ends.receive->add_pool(plain_pool(0, 4, std::byte{0}));
  FakeSender sender(ends);
  sender.hello();
  constexpr std::size_t kNotices = 5000;
  for (Generation generation = 1; generation <= kNotices; ++generation) {
    open_grant(ends, generation);
    // A stream that is full for a moment is written to the end by the next call.
    KVF_CHECK(sender.channel.send(shm::to_text(shm::Notice{transfer_key(generation), 1, 1, 1})).has_value());
    do {
      KVF_CHECK(sender.channel.flush().has_value());
    } while (sender.channel.wants_write());
  }
  CHECK(ends.receive_log.wait([](const EventLog::Events& events) {
    return EventLog::count<Landed>(events) + EventLog::count<Rejected>(events) >= kNotices;
  }));
  CHECK(ends.receive_log.count<Landed>() == kNotices);
  CHECK(ends.receive_log.count<Rejected>() == 0);
}

TEST_CASE(
    "shm: a peer that closed its socket before its new hello is let in, in whatever order both are seen") {
  ShmEnds ends;
  ends.receive->add_pool(plain_pool(0, 4, std::byte{0}));
  open_grant(ends, 1);
  std::promise<void> blocked;
  std::promise<void> go_on;
  std::future<void> released = go_on.get_future();
  ends.on_receive = [&](const FabricEvent& event) {
    if (std::holds_alternative<fabric_event::GrantClosed>(event)) {
      blocked.set_value();
      released.wait();
    }
  };
  std::optional<FakeSender> first(std::in_place, ends);
  first->hello();
  REQUIRE_THAT(first->hears(), Contains("welcome"));
  ends.receive->close(GrantKey{98, 1, 0});
  blocked.get_future().wait();
  // While the receiver's thread stands still its listener becomes ready first, then the old socket, with more
  // notices than one read takes.
  FakeSender second(ends);
  for (int i = 0; i < 200; ++i) {
    first->say(shm::to_text(shm::Notice{transfer_key(1), 1, 100, 3}));
  }
  first.reset();
  second.hello();
  go_on.set_value();
  CHECK_THAT(second.hears(), Contains("welcome"));
  REQUIRE(ends.receive_log.wait_for<PeerDown>());
  CHECK(ends.receive_log.all<PeerDown>()[0].error.code == Code::kPeerLost);
  CHECK(ends.receive_log.count<Landed>() == 1);
  CHECK(ends.receive_log.count<Rejected>() == 199);
}

TEST_CASE("shm: a grant that does not fit its pool is reported") {
  ShmEnds ends;
  open_grant(ends, 1);
  REQUIRE(ends.receive_log.wait_for<Rejected>());
  CHECK(ends.receive_log.all<Rejected>()[0].peer == 0);
}

TEST_CASE("shm: a sender that breaks the protocol is told to let go, and is down only when it has") {
  const std::string notice = shm::to_text(shm::Notice{transfer_key(1), 1, 1, 1});
  for (const std::string& garbage :
       {std::string("garbage"), std::string("[1]"), std::string("{}"), std::string(5000, ' '),
        std::string("{\"type\":\"notice\",\"room\":-1}"), std::string("{\"type\":\"notice\",\"room\":1e99}"),
        std::string("{\"type\":7}"), std::string("{\"type\":\"pool\"}"), std::string(2000, '[')}) {
    ShmEnds ends;
    ends.receive->add_pool(plain_pool(0, 4, std::byte{0}));
    open_grant(ends, 1);
    INFO(garbage.substr(0, 40));
    {
      FakeSender sender(ends);
      sender.hello();
      sender.say(garbage);
      REQUIRE(ends.receive_log.wait_for<Rejected>());
      CHECK(ends.receive_log.all<Rejected>()[0].peer == kPeer);
      sender.say(notice);  // too late to count
      CHECK(ends.receive_log.count<PeerDown>() == 0);
    }
    REQUIRE(ends.receive_log.wait_for<PeerDown>());
    CHECK(ends.receive_log.all<PeerDown>()[0].error.code == Code::kProtocol);
    CHECK(ends.receive_log.count<Landed>() == 0);
  }
}

TEST_CASE("shm: whatever comes before a valid hello is dropped and leaves the daemon serving") {
  const std::uint64_t seed = test_seed(77);
  INFO("seed " << seed);
  Rng rng(seed);
  ShmEnds ends;
  const std::string hello = shm::to_text(shm::Hello{std::string(32, 'a')});
  for (std::size_t round = 1; round <= 100; ++round) {
    FakeSender sender(ends);
    std::string text = hello;
    for (std::uint64_t changes = rng.between(1, 4); changes > 0; --changes) {
      text[rng.below(text.size())] = static_cast<char>(rng.next());
    }
    sender.say(text);
    REQUIRE(ends.receive_log.wait_for<Rejected>(round));
  }
  for (std::size_t round = 0; round < 100; ++round) {
    auto raw = shm::connect_unix(ends.folder.socket());
    REQUIRE(raw.has_value());
    std::string bytes(rng.between(0, 64), '\0');
    for (char& byte : bytes) {
      byte = static_cast<char>(rng.next());
    }
    ::send(raw->get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }
  CHECK(ends.connect());
}

/// A receive end that is really this test: one session, answered by hand.
struct FakeReceiver {
  FakeReceiver() : listener(*shm::ListenSocket::open(folder.socket(), 0600)) {}
  FabricOffer offer() const {
    return FabricOffer{FabricKind::kShm,
                       shm::to_text(shm::Offer{boot_id(), folder.socket(), random_hex(), 5})};
  }
  /// After connect(): takes the connection, which exists by the time connect() has returned in the fabric.
  shm::Channel accept() const {
    int fd = -1;
    while ((fd = ::accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC)) < 0) {
      std::this_thread::yield();
    }
    return shm::Channel(UniqueFd(fd), kRoomy);
  }
  TempFolder folder;
  shm::ListenSocket listener;
};

void say(shm::Channel& channel, const std::string& text, std::shared_ptr<const Pool> pool = nullptr) {
  KVF_CHECK(channel.send(text, std::move(pool)).has_value());
  // The fabric may have hung up on an earlier frame already.
  (void)channel.flush();
}

struct Victim {
  explicit Victim(ShmSendOptions options = {}) : send(*ShmSendFabric::create(options, log.sink())) {}
  EventLog log;
  std::unique_ptr<ShmSendFabric> send;
};

TEST_CASE("shm: a decode daemon that breaks the protocol is down, the prefill daemon lives on") {
  const auto pool = plain_pool(0, 4, std::byte{0});
  shm::PoolAdded good{1, 1, pool->layout()};
  shm::PoolAdded more_descriptors = good;
  more_descriptors.fds = 2;
  const std::string welcome = shm::to_text(shm::Welcome{5, 0});
  const std::vector<std::vector<std::string>> scripts = {
      {"nonsense"},
      {shm::to_text(shm::Welcome{6, 0})},                    // another epoch
      {shm::to_text(good)},                                  // before welcome
      {welcome, welcome},                                    // twice
      {welcome, shm::to_text(more_descriptors)},             // without its descriptors
      {welcome, "{\"type\":\"pool\",\"serial\":1}"},         // fields missing
      {welcome, "{\"type\":\"pool_gone\",\"rank\":\"0\"}"},  // a text for a number
      {welcome, std::string(2 << 20, ' ')},                  // too long
      {shm::to_text(shm::Refused{Error{Code::kExhausted, "full"}})},
  };
  Victim victim;
  std::size_t down = 0;
  for (const auto& script : scripts) {
    FakeReceiver receiver;
    victim.send->connect(kPeer, receiver.offer());
    shm::Channel channel = receiver.accept();
    for (const std::string& text : script) {
      say(channel, text);
    }
    INFO(script.back().substr(0, 60));
    REQUIRE(victim.log.wait_for<PeerDown>(++down));
  }
  CHECK(victim.log.all<PeerDown>().back().error == Error{Code::kExhausted, "full"});
  FakeReceiver good_receiver;
  victim.send->connect(kPeer, good_receiver.offer());
  shm::Channel channel = good_receiver.accept();
  say(channel, welcome);
  say(channel, shm::to_text(good), pool);
  const std::size_t before = victim.log.count<fabric_event::ChunkDone>();
  victim.send->post(kPeer, chunk(transfer_key(1), row_plan(1), plain_pool(0, 1, std::byte{9})));
  REQUIRE(victim.log.wait_for<fabric_event::ChunkDone>(before + 1));
  CHECK(pool->buffer(0)[0] == std::byte{9});
}

TEST_CASE("shm: pools that could fault or that are larger than their memory fail only their own transfers") {
  const auto pool = plain_pool(0, 4, std::byte{0});
  shm::PoolAdded larger{1, 1, pool->layout()};
  larger.layout.buffers[0].shape.pages = 5;
  shm::PoolAdded wrapping{2, 1, pool->layout()};
  wrapping.layout.rank = 1;
  wrapping.layout.buffers[0].offset = ~std::uint64_t{0} - 5;
  shm::PoolAdded good{3, 1, pool->layout()};
  good.layout.rank = 2;
  Victim victim;
  FakeReceiver receiver;
  victim.send->connect(kPeer, receiver.offer());
  shm::Channel channel = receiver.accept();
  say(channel, shm::to_text(shm::Welcome{5, 3}));
  say(channel, shm::to_text(larger), pool);
  say(channel, shm::to_text(wrapping), pool);
  say(channel, shm::to_text(good), pool);
  REQUIRE(victim.log.wait_for<PeerUp>());
  const auto source = plain_pool(0, 1, std::byte{9});
  for (RankIndex rank = 0; rank < 3; ++rank) {
    victim.send->post(kPeer, chunk(transfer_key(rank + 1, rank), row_plan(1), source));
  }
  REQUIRE(victim.log.wait_for<ChunkFailed>(2));
  REQUIRE(victim.log.wait_for<fabric_event::ChunkDone>());
  CHECK_THAT(victim.log.all<ChunkFailed>()[0].error.message, Contains("pool of rank 0"));
}

TEST_CASE("shm: a descriptor that may shrink is refused") {
  // The channel sends the descriptors of a Pool, and Pool::map refuses what may shrink; so this one is sent
  // by hand: a memfd without seals.
  Victim victim;
  FakeReceiver receiver;
  victim.send->connect(kPeer, receiver.offer());
  shm::Channel channel = receiver.accept();
  say(channel, shm::to_text(shm::Welcome{5, 1}));
  const UniqueFd unsealed(::memfd_create("kvferry-test-unsealed", MFD_CLOEXEC));
  REQUIRE(::ftruncate(unsealed.get(), 4 * kPageRows * kRowBytes) == 0);
  const std::string text = shm::to_text(shm::PoolAdded{1, 1, plain_pool(0, 4, std::byte{0})->layout()});
  std::string bytes(4, '\0');
  for (std::size_t i = 0; i < 4; ++i) {
    bytes[i] = static_cast<char>(text.size() >> (8 * i));
  }
  bytes += text;
  iovec data{bytes.data(), bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof control;
  cmsghdr* rights = CMSG_FIRSTHDR(&header);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(sizeof(int));
  const int fd = unsealed.get();
  std::memcpy(CMSG_DATA(rights), &fd, sizeof fd);
  REQUIRE(::sendmsg(channel.fd(), &header, 0) == static_cast<ssize_t>(bytes.size()));
  REQUIRE(victim.log.wait_for<PeerUp>());
  victim.send->post(kPeer, chunk(transfer_key(1), row_plan(1), plain_pool(0, 1, std::byte{9})));
  REQUIRE(victim.log.wait_for<ChunkFailed>());
  CHECK_THAT(victim.log.all<ChunkFailed>()[0].error.message, Contains("seal"));
}

TEST_CASE("shm: a peer cannot make the daemon map more than mapped_bytes_max") {
  ShmSendOptions options;
  options.mapped_bytes_max = 100 << 10;
  ShmEnds ends(options);
  ends.receive->add_pool(plain_pool(0, 4, std::byte{0}));
  REQUIRE(ends.connect());
  ends.receive->add_pool(plain_pool(1, 4, std::byte{0}));
  REQUIRE(ends.send_log.wait_for<PeerDown>());
  const Error error = ends.send_log.all<PeerDown>()[0].error;
  CHECK(error.code == Code::kExhausted);
  CHECK_THAT(error.message, Contains("mapped_bytes_max"));
}

TEST_CASE("shm: a daemon that accepts and says nothing is given up after welcome_wait") {
  ShmSendOptions options;
  options.welcome_wait = std::chrono::milliseconds(20);
  Victim victim(options);
  FakeReceiver receiver;
  victim.send->connect(kPeer, receiver.offer());
  REQUIRE(victim.log.wait_for<PeerDown>());
  CHECK(victim.log.all<PeerDown>()[0].error.code == Code::kDeadline);
}

TEST_CASE("shm: messages survive their text form, and damaged texts are errors, never crashes") {
  const std::uint64_t seed = test_seed(4242);
  INFO("seed " << seed);
  Rng rng(seed);
  PoolLayout layout;
  layout.rank = 7;
  layout.page_size = 64;
  layout.buffers.push_back(
      BufferPlace{BufferShape{3, BufferKind::kKey, 1152, 1ull << 40, 64, 66}, 2, 1ull << 50});
  layout.aux.push_back(AuxField{kAuxRoomField, 8, 16, 1, 4096});
  const std::vector<std::string> texts = {
      shm::to_text(shm::Hello{random_hex()}),
      shm::to_text(shm::Notice{TransferKey{GrantKey{kRoomMax, ~0ull, 5}, 6}, 7, ~0ull, 9}),
      shm::to_text(shm::Welcome{~0ull, 3}),
      shm::to_text(shm::PoolAdded{9, 3, layout}),
      shm::to_text(shm::PoolGone{1, 2}),
      shm::to_text(shm::Refused{Error{Code::kConflict, "a\xFF b"}})};
  const auto notice = std::get<shm::Notice>(*shm::parse_from_sender(texts[1]));
  CHECK(notice.key == TransferKey{GrantKey{kRoomMax, ~0ull, 5}, 6});
  CHECK(notice.bytes == ~0ull);
  CHECK(std::get<shm::Welcome>(*shm::parse_from_receiver(texts[2])).epoch == ~0ull);
  const auto pool = std::get<shm::PoolAdded>(*shm::parse_from_receiver(texts[3]));
  CHECK(pool.layout.buffers[0].shape == layout.buffers[0].shape);
  CHECK(pool.layout.buffers[0].offset == 1ull << 50);
  CHECK(pool.layout.aux[0].name == kAuxRoomField);
  CHECK(std::get<shm::Refused>(*shm::parse_from_receiver(texts[5])).error.code == Code::kConflict);
  std::size_t refused = 0;
  for (int round = 0; round < 5000; ++round) {
    std::string text = rng.pick(texts);
    for (std::uint64_t changes = rng.between(1, 3); changes > 0; --changes) {
      const std::size_t at = rng.below(text.size());
      if (rng.chance(1, 3)) {
        text.erase(at, rng.between(1, 4));
        text += ' ';
      } else {
        text[at] = static_cast<char>(rng.next());
      }
    }
    refused += shm::parse_from_sender(text).has_value() ? 0 : 1;
    refused += shm::parse_from_receiver(text).has_value() ? 0 : 1;
    (void)shm::parse_offer(text);
  }
  CHECK(refused > 5000);
}

}  // namespace
}  // namespace kvferry::test
