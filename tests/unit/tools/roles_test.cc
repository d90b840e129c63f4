// The synthetic engine's two roles against a fake daemon: what they ask for, what they report, and that every
// page comes back whatever happens.

#include <poll.h>

#include <algorithm>
#include <cstring>

#include <catch2/catch.hpp>

#include "common/base/log.h"
#include "common/pool/writer_lock.h"
#include "fake_daemon.h"
#include "tools/engine/decode_role.h"
#include "tools/engine/prefill_role.h"

namespace kvferry {
namespace {

constexpr Room kRoom = 42;

struct Sink : EventSink {
  std::vector<nlohmann::json> events;
  void emit(const nlohmann::json& event) override { events.push_back(event); }
  nlohmann::json last(const std::string& name) const {
    for (auto event = events.rbegin(); event != events.rend(); ++event) {
      if (event->at("event") == name) {
        return *event;
      }
    }
    return {};
  }
};

// Two ranks of a small model, attached.
struct World {
  explicit World(const char* topology_text) {
    fake_daemon() = FakeDaemon{};
    log::set_level(log::Level::kError);
    RankOptions options;
    options.model.attention = AttentionKind::kMha;
    options.model.hidden_layers = 2;
    options.model.kv_layers = {0, 1};
    options.model.kv_heads = 2;
    options.model.head_dim = options.model.v_head_dim = 8;
    options.model.hidden_size = 16;
    options.topology = parse_topology(topology_text).value();
    options.page_size = 4;
    options.pages = 16;
    options.aux_slots = 2;
    role_options = {options.model, options.topology.dp, 1};
    ranks.reserve(2);
    for (RankIndex index = 0; index < options.topology.rank_count(); ++index) {
      auto rank = Rank::create(options, index);
      REQUIRE(rank);
      ranks.push_back(*std::move(rank));
      REQUIRE(ranks.back().attach(now).value_or(false));
    }
  }
  ~World() {
    ranks.clear();
    CHECK(fake_daemon().attached == 0);
  }

  void work(EngineRole& role) {
    while (role.work(now)) {
    }
  }
  kvf_event event(kvf_event_type type, std::uint64_t tokens = 0, const char* reason = "") const {
    kvf_event result{};
    result.struct_size = sizeof(result);
    result.type = type;
    result.room = kRoom;
    result.tokens = tokens;
    result.code = KVF_PEER_LOST;
    std::strncpy(result.reason, reason, sizeof(result.reason) - 1);
    return result;
  }
  bool balanced() const {
    return std::all_of(ranks.begin(), ranks.end(), [](const Rank& rank) {
      return rank.pages.live_count() == 0 && rank.slots.live_count() == 0;
    });
  }

  RoleOptions role_options;
  std::vector<Rank> ranks;
  Sink sink;
  Instant now = Instant{} + std::chrono::hours(1);
};

nlohmann::json request(std::uint64_t tokens, std::uint64_t prefix, bool stream) {
  return {{"room", kRoom}, {"tokens", tokens}, {"prefix", prefix}, {"chunk_tokens", 8}, {"stream", stream}};
}

nlohmann::json expectation(std::uint64_t tokens, std::uint64_t prefix) {
  return {{"room", kRoom}, {"tokens", tokens}, {"prefix", prefix}, {"bootstrap", "127.0.0.1:1"}};
}

// Writes into a decode rank's granted pages what the real daemons would.
void land_bytes(Rank& rank, const FakeCall& call) {
  const RoomRows rows{call.room, call.first_token, call.token_count, call.pages};
  for (std::uint32_t i = 0; i < rank.rows.buffers().size(); ++i) {
    rank.rows.fill(rank.memory.buffer(i), i, rows, {rows.first, rows.end});
  }
  fill_aux(rank.memory, static_cast<std::uint32_t>(call.aux_slot), call.room);
}

}  // namespace

TEST_CASE("prefill sends chunks without gaps, the last with the aux row, and frees all pages on landing") {
  const bool stream = GENERATE(true, false);
  World world("tp=2");
  PrefillRole role(world.role_options, world.ranks, world.sink);
  REQUIRE(role.on_command("request", request(30, 4, stream)));
  CHECK(world.ranks[0].pages.live_count() == 7);
  world.work(role);
  const auto sends = fake_daemon().named("send");
  REQUIRE(sends.size() == 8);
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    std::uint64_t next = 4;
    for (const FakeCall& call : sends) {
      if (call.tp_rank == rank) {
        CHECK(call.first_token == next);
        CHECK(call.pages.size() == (call.token_count + 3) / 4);
        next += call.token_count;
        CHECK(call.last == (next == 30));
        CHECK((call.aux_slot >= 0) == call.last);
      }
    }
    CHECK(next == 30);
  }
  role.on_event(world.ranks[0], world.event(KVF_EVENT_LANDED, 30), world.now);
  CHECK(world.sink.last("landed").is_null());
  role.on_event(world.ranks[1], world.event(KVF_EVENT_LANDED, 30), world.now);
  CHECK(world.sink.last("landed").at("room") == kRoom);
  CHECK(world.balanced());
}

TEST_CASE(
    "with layer groups prefill sends each chunk by layers, and a fence opens when its layers are filled") {
  World one("tp=1");
  PrefillRole sender(one.role_options, one.ranks, one.sink);
  nlohmann::json command = request(14, 4, true);
  command["layer_group"] = 1;
  REQUIRE(sender.on_command("request", command));
  Rank& rank = one.ranks[0];
  const auto filled = [&](const FakeCall& call) {
    const RoomRows rows{kRoom, call.first_token, call.first_token + call.token_count, call.pages};
    for (std::uint32_t i = 0; i < rank.rows.buffers().size(); ++i) {
      const std::uint32_t layer = rank.rows.buffers()[i].layer;
      if (layer >= call.layer_begin && layer < call.layer_end) {
        const auto lies = rank.memory.buffer(i);
        std::vector<std::byte> wanted(lies.begin(), lies.end());
        rank.rows.fill(wanted, i, rows, {rows.first, rows.end});
        if (!std::equal(wanted.begin(), wanted.end(), lies.begin())) {
          return false;
        }
      }
    }
    return true;
  };
  std::size_t closed = 0;
  bool working = true;
  while (working) {
    working = sender.work(one.now);
    for (const FakeCall& call : fake_daemon().named("send")) {
      REQUIRE(call.ready);
      pollfd fence{call.ready->get(), POLLIN, 0};
      const bool open = ::poll(&fence, 1, 0) == 1;
      CHECK(open == filled(call));
      closed += open ? 0 : 1;
    }
  }
  CHECK(closed > 0);  // the calls came before the rows
  const auto sends = fake_daemon().named("send");
  REQUIRE(sends.size() == 4);
  for (std::size_t i = 0; i < sends.size(); ++i) {
    CHECK(sends[i].first_token == (i < 2 ? 4 : 12));
    CHECK(sends[i].layer_begin == i % 2);
    CHECK(sends[i].layer_end == i % 2 + 1);
    CHECK(sends[i].pages == sends[i / 2 * 2].pages);
    CHECK(sends[i].last == (i == 3));
    CHECK((sends[i].aux_slot >= 0) == sends[i].last);
    pollfd fence{sends[i].ready->get(), POLLIN, 0};
    CHECK(::poll(&fence, 1, 0) == 1);
  }
}

TEST_CASE(
    "groups of layers are sent without fences when everything is filled first, and an empty chunk whole") {
  World world("tp=1");
  PrefillRole role(world.role_options, world.ranks, world.sink);
  nlohmann::json command = request(8, 0, false);
  command["layer_group"] = 1;
  REQUIRE(role.on_command("request", command));
  world.work(role);
  const auto sends = fake_daemon().named("send");
  REQUIRE(sends.size() == 2);
  CHECK(sends[0].layer_end == 1);
  CHECK_FALSE(sends[0].last);
  CHECK(sends[1].layer_end == 2);
  CHECK(sends[1].last);
  CHECK(sends[0].ready == nullptr);
  role.on_event(world.ranks[0], world.event(KVF_EVENT_LANDED, 8), world.now);
  fake_daemon().calls.clear();
  command = request(8, 8, true);
  command["layer_group"] = 1;
  REQUIRE(role.on_command("request", command));
  world.work(role);
  REQUIRE(fake_daemon().named("send").size() == 1);
  CHECK(fake_daemon().named("send")[0].layer_end == 0);
  CHECK(fake_daemon().named("send")[0].last);
}

TEST_CASE("the fences of a room that fails are opened, so that no daemon waits for them") {
  World world("tp=1");
  PrefillRole role(world.role_options, world.ranks, world.sink);
  nlohmann::json command = request(8, 0, true);
  command["layer_group"] = 1;
  REQUIRE(role.on_command("request", command));
  while (fake_daemon().named("send").size() < 2) {
    REQUIRE(role.work(world.now));
  }
  role.on_event(world.ranks[0], world.event(KVF_EVENT_FAILED, 0, "lost"), world.now);
  CHECK(world.sink.last("failed").at("reason") == "lost");
  for (const FakeCall& call : fake_daemon().named("send")) {
    pollfd fence{call.ready->get(), POLLIN, 0};
    CHECK(::poll(&fence, 1, 0) == 1);
  }
  CHECK(world.balanced());
}

TEST_CASE("a grant is reported once, and one for another prefix fails the room") {
  World world("tp=2");
  PrefillRole role(world.role_options, world.ranks, world.sink);
  REQUIRE(role.on_command("request", request(30, 4, true)));
  world.work(role);
  role.on_event(world.ranks[0], world.event(KVF_EVENT_GRANTED, 4), world.now);
  CHECK(world.sink.last("granted").at("room") == kRoom);
  world.sink.events.clear();
  role.on_event(world.ranks[1], world.event(KVF_EVENT_GRANTED, 8), world.now);
  CHECK(world.sink.last("granted").is_null());
  CHECK(fake_daemon().named("abort").size() == 2);
}

TEST_CASE("a full prefix hit still sends one empty last chunk with the aux row") {
  World world("tp=1");
  PrefillRole role(world.role_options, world.ranks, world.sink);
  REQUIRE(role.on_command("request", request(8, 8, true)));
  world.work(role);
  const auto sends = fake_daemon().named("send");
  REQUIRE(sends.size() == 1);
  CHECK(sends[0].first_token == 8);
  CHECK(sends[0].token_count == 0);
  CHECK(sends[0].pages.empty());
  CHECK(sends[0].last);
  CHECK(sends[0].aux_slot >= 0);
}

TEST_CASE("a chunk that meets a limit is sent again later, in order") {
  World world("tp=1");
  fake_daemon().send_codes[0] = -KVF_EXHAUSTED;
  PrefillRole role(world.role_options, world.ranks, world.sink);
  REQUIRE(role.on_command("request", request(30, 0, true)));
  world.work(role);
  CHECK(fake_daemon().calls.empty());
  CHECK(role.waits_for_retry());
  fake_daemon().send_codes[0] = 0;
  world.now += std::chrono::seconds(1);
  world.work(role);
  const auto sends = fake_daemon().named("send");
  REQUIRE(sends.size() == 4);
  CHECK(sends.front().first_token == 0);
  CHECK(sends.back().last);
}

TEST_CASE("one rank's failure aborts the room on the other, and the first reason is reported") {
  World world("tp=2");
  PrefillRole role(world.role_options, world.ranks, world.sink);
  REQUIRE(role.on_command("request", request(30, 0, true)));
  world.work(role);
  role.on_event(world.ranks[1], world.event(KVF_EVENT_FAILED, 0, "peer demo-decode was lost"), world.now);
  const auto aborts = fake_daemon().named("abort");
  REQUIRE(aborts.size() == 1);
  CHECK(aborts[0].tp_rank == 0);
  CHECK(world.sink.last("failed").is_null());
  CHECK(world.ranks[1].pages.live_count() == 0);
  CHECK(world.ranks[0].pages.live_count() > 0);
  role.on_event(world.ranks[0], world.event(KVF_EVENT_ABORTED, 0, "aborted"), world.now);
  CHECK(world.sink.last("failed").at("reason") == "peer demo-decode was lost");
  CHECK(world.sink.last("failed").at("code") == "peer_lost");
  CHECK(world.balanced());
}

TEST_CASE(
    "a rank that has sent everything may land while another still fills, but not before its last chunk") {
  World world("tp=2");
  PrefillRole role(world.role_options, world.ranks, world.sink);
  REQUIRE(role.on_command("request", request(8, 0, true)));
  while (fake_daemon().named("send").empty()) {
    REQUIRE(role.work(world.now));
  }
  role.on_event(world.ranks[0], world.event(KVF_EVENT_LANDED, 8), world.now);
  world.work(role);
  role.on_event(world.ranks[1], world.event(KVF_EVENT_LANDED, 8), world.now);
  CHECK(world.sink.last("landed").at("room") == kRoom);

  REQUIRE(role.on_command("request", request(16, 0, true)));
  while (fake_daemon().named("send").size() < 3) {
    REQUIRE(role.work(world.now));
  }
  role.on_event(world.ranks[0], world.event(KVF_EVENT_LANDED, 16), world.now);
  CHECK(world.sink.last("failed").at("code") == "protocol");
  CHECK(world.balanced());
}

TEST_CASE("a second final event for a room is reported as a fault of the daemon") {
  World world("tp=1");
  PrefillRole role(world.role_options, world.ranks, world.sink);
  REQUIRE(role.on_command("request", request(4, 0, true)));
  world.work(role);
  role.on_event(world.ranks[0], world.event(KVF_EVENT_LANDED, 4), world.now);
  role.on_event(world.ranks[0], world.event(KVF_EVENT_FAILED, 0, "late"), world.now);
  CHECK(world.sink.last("stray").at("room") == kRoom);
  CHECK(world.sink.last("failed").is_null());
}

TEST_CASE("decode verifies every byte of every rank before it reports the landing") {
  World world("tp=2");
  DecodeRole role(world.role_options, world.ranks, world.sink);
  REQUIRE(role.on_command("expect", expectation(30, 8)));
  world.work(role);
  const auto expects = fake_daemon().named("expect");
  REQUIRE(expects.size() == 2);
  CHECK(world.sink.last("expected").at("room") == kRoom);
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    CHECK(expects[rank].first_token == 8);
    CHECK(expects[rank].token_count == 30);
    land_bytes(world.ranks[rank], expects[rank]);
    role.on_event(world.ranks[rank], world.event(KVF_EVENT_LANDED, 30), world.now);
    CHECK(world.sink.last("landed").is_null());
    world.work(role);
  }
  const auto landed = world.sink.last("landed");
  CHECK(landed.at("mismatches") == 0);
  // 22 tokens of 2 layers of K and V of 2 heads of 16 bytes; 6 pages of 4 rows were compared on each rank.
  CHECK(landed.at("payload") == 22 * 2 * 2 * 2 * 16);
  CHECK(landed.at("verified") == 24 * 2 * 2 * 2 * 16 + 2 * (64 + 64 + 14336 + 64));
  CHECK(world.balanced());
}

TEST_CASE("a landing that did not bring all bytes, or not to the aux row, is a mismatch") {
  const bool rows = GENERATE(true, false);
  World world("tp=1");
  DecodeRole role(world.role_options, world.ranks, world.sink);
  REQUIRE(role.on_command("expect", expectation(10, 0)));
  world.work(role);
  const FakeCall call = fake_daemon().named("expect").at(0);
  land_bytes(world.ranks[0], call);
  if (rows) {
    world.ranks[0].memory.buffer(2)[std::uint64_t{call.pages[2]} * 4 * 32 + 33] ^= std::byte{1};
  } else {
    clear_aux(world.ranks[0].memory, static_cast<std::uint32_t>(call.aux_slot));
  }
  role.on_event(world.ranks[0], world.event(KVF_EVENT_LANDED, 10), world.now);
  world.work(role);
  const auto landed = world.sink.last("landed");
  CHECK(landed.at("mismatches") > 0);
  CHECK(landed.contains("first") == rows);
  CHECK(landed.contains("aux_first") == !rows);
  if (rows) {
    CHECK(landed.at("mismatches") == 1);
    CHECK(landed.at("first").at("position") == 9);
    CHECK(landed.at("first").at("layer") == 0);
    CHECK(landed.at("first").at("kind") == "value");
  }
}

TEST_CASE("a landing of the wrong length is a failure") {
  World world("tp=1");
  DecodeRole role(world.role_options, world.ranks, world.sink);
  REQUIRE(role.on_command("expect", expectation(10, 0)));
  world.work(role);
  role.on_event(world.ranks[0], world.event(KVF_EVENT_LANDED, 6), world.now);
  CHECK(world.sink.last("failed").at("code") == "corrupt");
  CHECK(world.balanced());
}

TEST_CASE("a refusal on one rank ends the room on all, with the daemon's sentence") {
  World world("tp=2");
  fake_daemon().send_codes[1] = -KVF_MISMATCH;
  DecodeRole role(world.role_options, world.ranks, world.sink);
  REQUIRE(role.on_command("expect", expectation(10, 0)));
  world.work(role);
  REQUIRE(fake_daemon().named("abort").size() == 1);
  CHECK(world.ranks[1].pages.live_count() == 0);
  role.on_event(world.ranks[0], world.event(KVF_EVENT_ABORTED, 0, "aborted"), world.now);
  CHECK(world.sink.last("failed").at("reason").get<std::string>().find("refused by the test") !=
        std::string::npos);
  CHECK(world.balanced());
}

TEST_CASE(
    "after a daemon's death its rooms fail at once and their pages rest while somebody may write them") {
  World world("tp=2");
  DecodeRole role(world.role_options, world.ranks, world.sink);
  REQUIRE(role.on_command("expect", expectation(10, 0)));
  world.work(role);
  for (Rank& rank : world.ranks) {
    rank.lost(world.now);
    role.on_lost(rank, "the daemon went away");
  }
  CHECK(world.sink.last("failed").at("reason") == "the daemon went away");
  for (Rank& rank : world.ranks) {
    rank.end_quarantine(world.now + std::chrono::milliseconds(49));
    CHECK(rank.quarantined_pages() == 3);
    {
      std::vector<UniqueFd> memory;
      memory.emplace_back(::dup(rank.memory.fd()));
      const auto writer = WriterLock::take(memory);
      REQUIRE(writer);
      rank.end_quarantine(world.now + std::chrono::hours(1));
      CHECK(rank.quarantined_pages() == 3);
      // The next daemon would give the pool to writers anew, and the pages would rest for ever.
      CHECK_FALSE(rank.attach(rank.next_attempt()).value());
      CHECK(rank.next_attempt() > world.now);
    }
    rank.end_quarantine(world.now + std::chrono::milliseconds(50));
    CHECK(rank.quarantined_pages() == 0);
    CHECK(rank.attach(rank.next_attempt()).value());
  }
  CHECK(world.balanced());
}

TEST_CASE("a daemon that is away is tried again later, one that refuses for good is an error") {
  World world("tp=1");
  Rank& rank = world.ranks[0];
  rank.lost(world.now);
  fake_daemon().attach_code = -KVF_UNAVAILABLE;
  world.now = rank.next_attempt();
  CHECK_FALSE(rank.attach(world.now).value());
  CHECK(rank.next_attempt() > world.now);
  fake_daemon().attach_code = -KVF_MISMATCH;
  CHECK_FALSE(rank.attach(world.now).value());
  const auto refused = rank.attach(rank.next_attempt());
  REQUIRE_FALSE(refused);
  CHECK(refused.error().code == Code::kMismatch);
}

TEST_CASE("a room that does not fit, or is alive already, is refused and changes nothing") {
  World world("tp=2");
  DecodeRole role(world.role_options, world.ranks, world.sink);
  CHECK(role.on_command("expect", expectation(68, 0)).error().code == Code::kExhausted);
  CHECK(role.on_command("expect", expectation(10, 2)).error().code == Code::kInvalid);
  CHECK(world.balanced());
  REQUIRE(role.on_command("expect", expectation(10, 0)));
  CHECK(role.on_command("expect", expectation(10, 0)).error().code == Code::kConflict);
  CHECK(world.ranks[0].pages.live_count() == 3);
  CHECK(world.ranks[1].slots.live_count() == 1);
}

}  // namespace kvferry
