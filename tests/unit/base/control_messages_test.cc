// Control messages as wholes: what travels, that it comes back, and that damaged bytes are refused by name.

#include "common/control/messages.h"

#include <catch2/catch.hpp>
#include <iostream>

#include "common/base/clean_text.h"
#include "tests/support/rng.h"
#include "tests/unit/base/control_samples.h"

using namespace kvferry;
using namespace kvferry::test;
using Catch::StartsWith;
using nlohmann::json;

namespace {

std::string error_of(const std::string& bytes) {
  const auto message = decode_control(bytes);
  if (message) {
    return "accepted";
  }
  CHECK(message.error().code == Code::kProtocol);
  CHECK(is_clean_text(message.error().message));
  return message.error().message;
}

template <class Kind>
Kind decoded(const json& document) {
  const auto message = decode_control(pack(document));
  if (!message) {
    FAIL(message.error().message);
  }
  REQUIRE(std::holds_alternative<Kind>(*message));
  return std::get<Kind>(*message);
}

std::vector<std::uint32_t> random_words(Rng& rng, std::uint64_t count_max) {
  std::vector<std::uint32_t> out(rng.below(count_max + 1));
  for (std::uint32_t& word : out) {
    word = static_cast<std::uint32_t>(rng.next());
  }
  return out;
}

ControlMessage random_message(Rng& rng) {
  const GrantKey key{rng.between(1, kRoomMax), rng.next(), rng.between32(0, 65535)};
  const auto rank = rng.between32(0, 65535);
  const std::string text(rng.below(100), static_cast<char>(rng.between('a', 'z')));
  switch (rng.below(10)) {
    case 0: {
      message::RankUp out{.rank = rank, .page_size = rng.between32(0, 65536), .buffers = {}, .aux = {}};
      for (std::uint64_t left = rng.below(20); left > 0; --left) {
        out.buffers.push_back({rng.between32(0, UINT32_MAX), static_cast<BufferKind>(rng.below(3)),
                               rng.between32(0, UINT32_MAX), rng.between(0, std::uint64_t{1} << 40)});
        out.aux.push_back({text, rng.between32(0, 1u << 24), rng.between32(0, 1u << 24)});
      }
      return out;
    }
    case 1:
      return message::RankGone{rank};
    case 2: {
      const std::uint64_t tokens = rng.between(0, std::uint64_t{1} << 40);
      return message::Grant{.key = key,
                            .targets = random_words(rng, 8),
                            .prefill_dp = rng.between32(0, UINT32_MAX),
                            .pages = random_words(rng, 300),
                            .prefix = rng.between(0, tokens),
                            .tokens = tokens,
                            .has_aux = rng.chance(1, 2),
                            .aux_slot = rng.between32(0, UINT32_MAX)};
    }
    case 3:
      return message::Stop{key, random_words(rng, 8), Code::kAborted, text};
    case 4:
      return message::Landed{key};
    case 5:
      return message::FabricStatus{text, text + "!"};
    case 6:
      return message::TransferFailed{{key, rank}, Code::kCorrupt, text};
    case 7:
      return message::TransferDrained{{key, rank}};
    case 8: {
      message::TransferDigest out{{key, rng.between32(0, 65535)}, rng.below(1ull << 40), {}};
      out.digest.columns = rng.between(0, 9);
      for (std::uint32_t layer = rng.between32(0, 5); out.digest.layers.size() < 4;
           layer += rng.between32(1, 9)) {
        out.digest.layers.push_back(layer);
      }
      for (std::size_t i = 0; i < 4 * out.digest.columns; ++i) {
        out.digest.sums.push_back(rng.next());
      }
      return out;
    }
    default:
      return message::Heartbeat{rng.next()};
  }
}

}  // namespace

TEST_CASE("control: what travels for each kind") {
  const json room = {{"room", kRoomMax - 5}, {"generation", UINT64_MAX}, {"decode_rank", 65535}};
  const auto with_room = [&](json fields) {
    fields.update(room);
    return fields;
  };
  const json expected[] = {
      {{"op", "rank_up"},
       {"rank", 3},
       {"page_size", 64},
       {"buffers", {{1, 1, 1024, 99, 64, 64}, {60, 2, 1152, 7, 64, 64}}},
       {"aux", json::array({json::array({"bootstrap_room", 16, 128})})}},
      {{"op", "rank_gone"}, {"rank", 7}},
      with_room({{"op", "grant"},
                 {"targets", json::binary({0, 0, 0, 0, 5, 0, 0, 0, 0xFF, 0xFF, 0, 0})},
                 {"prefill_dp", 2},
                 {"pages", json::binary({0, 0, 0, 0, 1, 0, 0, 0, 2, 1, 0, 0, 0xFF, 0xFF, 0xFF, 0xFF})},
                 {"prefix", 64},
                 {"tokens", 1000},
                 {"has_aux", true},
                 {"aux_slot", 12},
                 {"window_pages", json::binary({9, 0, 0, 0})},
                 {"window_first", 896},
                 {"has_state", true},
                 {"state_slot", 0},
                 {"verify", 16}}),
      with_room({{"op", "stop"},
                 {"targets", json::binary({1, 0, 0, 0, 2, 0, 0, 0})},
                 {"code", 10},
                 {"reason", "too late"}}),
      with_room({{"op", "landed"}}),
      {{"op", "fabric"}, {"kind", "tcp"}, {"carries", "tcp 2x"}},
      with_room({{"op", "failed"}, {"prefill_rank", 9}, {"code", 20}, {"reason", "h\xC3\xA9"}}),
      with_room({{"op", "drained"}, {"prefill_rank", 9}}),
      with_room({{"op", "digest"},
                 {"prefill_rank", 9},
                 {"tokens_end", 990},
                 {"layers", json::binary({0, 0, 0, 0, 60, 0, 0, 0})},
                 {"columns", 2},
                 {"sums", json::binary({1,   0,   0,   0,   0,   0,   0,   0,   2, 0, 0, 0, 0, 0, 0, 0,
                                        255, 255, 255, 255, 255, 255, 255, 255, 0, 0, 0, 0, 0, 0, 0, 128})}}),
      {{"op", "heartbeat"}, {"sequence", UINT64_MAX}},
  };
  const std::vector<ControlMessage> samples = one_of_each();
  REQUIRE(samples.size() == std::size(expected));
  static_assert(std::variant_size_v<ControlMessage> == std::size(expected));
  for (std::size_t i = 0; i < samples.size(); ++i) {
    REQUIRE(samples[i].index() == i);
    CHECK(unpack(encode(samples[i])) == expected[i]);
  }
}

TEST_CASE("control: every kind comes back with every field") {
  for (const ControlMessage& sample : one_of_each()) {
    // No field of a sample has its default: one that decode_control() forgot would be encoded otherwise.
    const std::string bytes = encode(sample);
    const auto back = decode_control(bytes);
    REQUIRE(back);
    CHECK(back->index() == sample.index());
    CHECK(encode(*back) == bytes);
  }
}

TEST_CASE("control: random messages of every kind come back") {
  const std::uint64_t seed = test_seed(22);
  std::cout << "seed " << seed << "\n";
  Rng rng(seed);
  for (int round = 0; round < 3000; ++round) {
    CAPTURE(seed, round);
    const ControlMessage original = random_message(rng);
    const std::string bytes = encode(original);
    const auto back = decode_control(bytes);
    if (!back) {
      FAIL(back.error().message);
    }
    REQUIRE(back->index() == original.index());
    REQUIRE(encode(*back) == bytes);
  }
}

TEST_CASE("control: long reasons are cut between characters, and texts come out clean") {
  const std::string long_reason = std::string(4095, 'x') + "\xC3\xA9";
  const auto stop = decode_control(encode(message::Stop{{1, 1, 0}, {}, Code::kAborted, long_reason}));
  REQUIRE(stop);
  CHECK(std::get<message::Stop>(*stop).reason == std::string(4095, 'x'));
  const auto failed = decode_control(encode(message::TransferFailed{{{1, 1, 0}, 0}, Code::kIo, long_reason}));
  REQUIRE(failed);
  CHECK(std::get<message::TransferFailed>(*failed).reason == std::string(4095, 'x'));
  const auto status = decode_control(encode(message::FabricStatus{"t\ncp", "\xFF" + long_reason}));
  REQUIRE(status);
  CHECK(std::get<message::FabricStatus>(*status).kind == "t?cp");
  CHECK(std::get<message::FabricStatus>(*status).carries == "?" + std::string(4095, 'x'));
}

TEST_CASE("control: numbers of unknown errors are contained ones") {
  json document = unpack(encode(one_of_each()[3]));
  for (const unsigned number : {0u, 7u, 32u, 255u}) {
    document["code"] = number;
    CHECK(decoded<message::Stop>(document).code == Code::kInternal);
  }
  document["code"] = 11u;
  CHECK(decoded<message::Stop>(document).code == Code::kPeerLost);
}

TEST_CASE("control: fields of a later version are ignored, kinds of a later version are not") {
  json document = unpack(encode(one_of_each()[1]));
  document["invented_later"] = {1, 2, 3};
  CHECK(decoded<message::RankGone>(document).rank == 7);
  const auto unknown = [](const json& op) { return error_of(pack({{"op", op}, {"rank", 7}})); };
  CHECK(unknown("rank_gome") == "control message 'rank_gome' is unknown to this version");
  CHECK(unknown("") == "control message '' is unknown to this version");
  CHECK(unknown(std::string(31, 'o') + "\xC3\xA9") ==
        fmt::format("control message '{}' is unknown to this version", std::string(31, 'o')));
  CHECK(unknown("a\nb\xFF") == "control message 'a?b?' is unknown to this version");
  for (const json& op : {json(nullptr), json(1u), json(true), json::array({"grant"}), json::binary({1})}) {
    CHECK(unknown(op) == "control message has no text field 'op'");
  }
  CHECK(error_of(pack({{"rank", 7}})) == "control message has no text field 'op'");
}

TEST_CASE("control: only one whole map with text keys is a message") {
  CHECK(error_of("") == "control message ends inside its map, after 0 bytes");
  CHECK(error_of(pack(json::array({"op", "grant"}))) ==
        "control message is not a MessagePack map (first byte 0x92)");
  CHECK(error_of("{\"op\": \"landed\"}") == "control message is not a MessagePack map (first byte 0x7b)");
  CHECK(error_of("\x81\x01\x02") == "control message of 3 bytes is not a MessagePack map with text keys");
  CHECK(error_of("\x82\xA2op\xA1x\xA2op\xA1y") ==
        "control message repeats a key: 2 entries, 1 different keys");
  CHECK(error_of("\x81\xA2op\xD4\x01\x01") ==
        "control message has MessagePack type 0xd4 at byte 4, which is not used here");
}

TEST_CASE("control: every truncation and every trailing byte is refused") {
  for (const ControlMessage& sample : one_of_each()) {
    const std::string bytes = encode(sample);
    CAPTURE(unpack(bytes).at("op"));
    for (std::size_t size = 0; size < bytes.size(); ++size) {
      CAPTURE(size);
      REQUIRE_THAT(error_of(bytes.substr(0, size)), StartsWith("control message ends inside ") ||
                                                        StartsWith("control message has a value of "));
    }
    CHECK(error_of(bytes + '\0') ==
          fmt::format("control message has 1 bytes behind its map of {} bytes", bytes.size()));
  }
}

TEST_CASE("control: nesting and number of values are bounded before anything is built") {
  const auto nested = [](int levels) {
    json value = 1;
    for (int i = 0; i < levels; ++i) {
      value = json::array({value});
    }
    return error_of(pack({{"op", "heartbeat"}, {"sequence", value}}));
  };
  CHECK(nested(3) == "control message 'heartbeat': field 'sequence' must be a whole number up to " +
                         std::to_string(UINT64_MAX));
  CHECK(nested(4) == "control message is nested deeper than 4 levels");
  CHECK(nested(500) == "control message is nested deeper than 4 levels");
  CHECK(error_of("\x81\xA2op" + std::string(1u << 20, '\x91')) ==
        "control message is nested deeper than 4 levels");
  // The largest legal message: every buffer and aux field that a rank may have.
  message::RankUp most{.rank = 1, .page_size = 64, .buffers = {}, .aux = {}};
  most.buffers.resize(4096);
  most.aux.resize(64);
  CHECK(error_of(encode(most)) == "accepted");
  json document = unpack(encode(most));
  document["one"] = 1;
  CHECK(error_of(pack(document)) == "control message has 28940 values or more, at most 28938 are legal");
}

TEST_CASE("control: damaged messages are refused by name or mean something else, and harm nothing") {
  const std::uint64_t seed = test_seed(23);
  std::cout << "seed " << seed << "\n";
  Rng rng(seed);
  const std::vector<ControlMessage> samples = one_of_each();
  int accepted = 0;
  constexpr int kRounds = 40000;
  for (int round = 0; round < kRounds; ++round) {
    std::string bytes = encode(rng.chance(1, 2) ? rng.pick(samples) : random_message(rng));
    for (std::uint64_t left = rng.between(1, 3); left > 0; --left) {
      const std::size_t at = rng.below(bytes.size());
      switch (rng.below(4)) {
        case 0:
          bytes[at] = static_cast<char>(rng.below(256));
          break;
        case 1:
          bytes[at] = static_cast<char>(bytes[at] ^ (1 << rng.below(8)));
          break;
        case 2:
          bytes.erase(at, rng.between(1, 4));
          break;
        default:
          bytes.insert(at, bytes.substr(rng.below(bytes.size()), rng.between(1, 8)));
          break;
      }
      bytes += bytes.empty() ? "?" : "";
    }
    CAPTURE(seed, round);
    const auto message = decode_control(bytes);
    if (!message) {
      REQUIRE(message.error().code == Code::kProtocol);
      REQUIRE_THAT(message.error().message, StartsWith("control message "));
      REQUIRE(is_clean_text(message.error().message));
      continue;
    }
    ++accepted;
    // Whatever it means now is a legal message in every respect.
    const auto again = decode_control(encode(*message));
    REQUIRE(again);
    REQUIRE(encode(*again) == encode(*message));
  }
  CHECK(accepted > kRounds / 50);
  CHECK(accepted < kRounds / 2);
}
