// The scan of MessagePack bytes alone: what it accepts is what the parser accepts, and what it refuses has a
// name, whatever the bytes claim about themselves.

#include "common/base/msgpack_scan.h"

#include <catch2/catch.hpp>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/support/rng.h"

using namespace kvferry;
using Catch::Equals;
using Catch::StartsWith;
using nlohmann::json;

namespace {

constexpr MsgpackLimits kWide{.depth_max = 64, .values_max = 1u << 20};

Result<std::uint32_t> scan(const std::string& bytes, const MsgpackLimits& limits = kWide) {
  return check_msgpack_map(std::as_bytes(std::span(bytes)), limits, "text");
}

std::string error_of(const std::string& bytes, const MsgpackLimits& limits = kWide) {
  const auto entries = scan(bytes, limits);
  if (entries) {
    return "accepted";
  }
  CHECK(entries.error().code == Code::kProtocol);
  return entries.error().message;
}

// Bytes from numbers, so that no literal runs into its neighbour.
std::string raw(std::initializer_list<int> bytes) {
  std::string out;
  for (const int byte : bytes) {
    out.push_back(static_cast<char>(byte));
  }
  return out;
}

// {"a": value}
std::string map_of(const std::string& value) {
  return raw({0x81, 0xA1, 'a'}) + value;
}

std::string packed(const json& value) {
  const auto bytes = json::to_msgpack(value);
  return {bytes.begin(), bytes.end()};
}

// One of every type that the JSON library writes, in both short and long forms.
json every_type() {
  json document = {{"nil", nullptr},
                   {"yes", true},
                   {"tiny", 7},
                   {"u8", 200},
                   {"u16", 60000},
                   {"u32", 4000000000u},
                   {"u64", std::uint64_t{1} << 63},
                   {"negative", -5},
                   {"i8", -100},
                   {"i16", -30000},
                   {"i32", -2000000000},
                   {"i64", std::int64_t{-1} << 62},
                   {"single", 1.5},
                   {"double", 0.1},
                   {"short", "abc"},
                   {"str8", std::string(200, 's')},
                   {"str16", std::string(300, 't')},
                   {"bin8", json::binary({1, 2, 3})},
                   {"bin16", json::binary(std::vector<std::uint8_t>(300, 9))},
                   {"list", {1, {2, 3}, json::object({{"in", json::array()}})}}};
  for (int i = 0; i < 20; ++i) {
    document["list16"].push_back(i);
    document["map16"]["key" + std::to_string(i)] = i;
  }
  return document;
}

}  // namespace

TEST_CASE("msgpack scan: a map is accepted with its entry count, repeated keys included") {
  const auto count = [](const std::string& bytes) {
    const auto entries = scan(bytes);
    REQUIRE(entries);
    return *entries;
  };
  CHECK(count(raw({0x80})) == 0);
  CHECK(count(raw({0xDE, 0, 0})) == 0);
  CHECK(count(raw({0xDF, 0, 0, 0, 1, 0xA1, 'a', 0xC0})) == 1);
  CHECK(count(raw({0x82, 0xA1, 'a', 1, 0xA1, 'a', 2})) == 2);
  CHECK(count(packed(every_type())) == every_type().size());
}

TEST_CASE("msgpack scan: only a map may be outermost") {
  CHECK_THAT(error_of(""), Equals("text ends inside its map, after 0 bytes"));
  CHECK_THAT(error_of(raw({0x90})), Equals("text is not a MessagePack map (first byte 0x90)"));
  CHECK_THAT(error_of(raw({0x07})), Equals("text is not a MessagePack map (first byte 0x07)"));
  CHECK_THAT(error_of(raw({0xA1, 'a'})), Equals("text is not a MessagePack map (first byte 0xa1)"));
  CHECK_THAT(error_of("{\"op\": 1}"), Equals("text is not a MessagePack map (first byte 0x7b)"));
}

TEST_CASE("msgpack scan: each of the 256 type bytes takes exactly the bytes that the format gives it") {
  // Payloads by the MessagePack specification; -1: not accepted (0xC1 is unused, the rest are extensions).
  const auto payload_of = [](int type) {
    switch (type) {
      case 0xC0:
      case 0xC2:
      case 0xC3:
        return 0;
      case 0xCA:
      case 0xCE:
      case 0xD2:
        return 4;
      case 0xCB:
      case 0xCF:
      case 0xD3:
        return 8;
      case 0xCC:
      case 0xD0:
        return 1;
      case 0xCD:
      case 0xD1:
        return 2;
      case 0xC4:  // with zero bytes as payload, a length field is 0 and nothing follows
      case 0xD9:
        return 1;
      case 0xC5:
      case 0xDA:
      case 0xDC:
      case 0xDE:
        return 2;
      case 0xC6:
      case 0xDB:
      case 0xDD:
      case 0xDF:
        return 4;
      default:
        break;
    }
    if (type <= 0x7F || type >= 0xE0) {
      return 0;
    }
    if (type <= 0x8F) {
      return 2 * (type - 0x80);  // zero bytes are integers: one byte for each key and value
    }
    if (type <= 0x9F) {
      return type - 0x90;
    }
    return type <= 0xBF ? type - 0xA0 : -1;
  };
  for (int type = 0; type < 256; ++type) {
    CAPTURE(type);
    const std::string head = map_of(raw({type}));
    const int payload = payload_of(type);
    if (payload < 0) {
      CHECK_THAT(
          error_of(head + std::string(32, '\0')),
          Equals(fmt::format("text has MessagePack type 0x{:02x} at byte 3, which is not used here", type)));
      continue;
    }
    const auto size = static_cast<std::size_t>(payload);
    CHECK(scan(head + std::string(size, '\0')));
    CHECK_THAT(error_of(head + std::string(size + 1, '\0')),
               Equals(fmt::format("text has 1 bytes behind its map of {} bytes", 4 + size)));
    if (size > 0) {
      CHECK_THAT(error_of(head + std::string(size - 1, '\0')), !Equals("accepted"));
    }
  }
}

TEST_CASE("msgpack scan: nesting is counted in containers, the outer map included") {
  for (std::size_t depth_max = 1; depth_max <= 8; ++depth_max) {
    CAPTURE(depth_max);
    const MsgpackLimits limits{.depth_max = depth_max, .values_max = 100};
    const std::string error = fmt::format("text is nested deeper than {} levels", depth_max);
    CHECK(scan(map_of(std::string(depth_max - 1, '\x91') + raw({1})), limits));
    CHECK_THAT(error_of(map_of(std::string(depth_max, '\x91') + raw({1})), limits), Equals(error));
    CHECK_THAT(error_of(map_of(std::string(depth_max, '\x91')), limits), Equals(error));  // and cut short
    // An empty container is a level too, and maps count like lists.
    CHECK_THAT(error_of(map_of(std::string(depth_max - 1, '\x91') + raw({0x80})), limits), Equals(error));
  }
  // Siblings are not nested in each other, wherever they stand.
  const MsgpackLimits two{.depth_max = 2, .values_max = 100};
  CHECK(scan(raw({0x83, 0xA1, 'a', 0x90, 0xA1, 'b', 0x91, 5, 0xA1, 'c', 0x80}), two));
  // A container as the last value of its parent is still inside it.
  CHECK_THAT(error_of(raw({0x81, 0xA1, 'a', 0x92, 1, 0x90}), two),
             Equals("text is nested deeper than 2 levels"));
}

TEST_CASE("msgpack scan: a bomb of a million levels is refused by its depth alone") {
  for (const char level : {'\x91', '\x81'}) {
    CHECK_THAT(error_of(map_of(std::string(1u << 20, level)), {.depth_max = 4, .values_max = 1u << 30}),
               Equals("text is nested deeper than 4 levels"));
  }
}

TEST_CASE("msgpack scan: keys and values are counted up to the limit") {
  const MsgpackLimits limits{.depth_max = 4, .values_max = 6};
  CHECK(scan(map_of(raw({0x94, 1, 2, 3, 4})), limits));
  CHECK_THAT(error_of(map_of(raw({0x95, 1, 2, 3, 4, 5})), limits),
             Equals("text has 7 values or more, at most 6 are legal"));
  CHECK(scan(map_of(raw({0x82, 0xA1, 'b', 1, 0xA1, 'c', 2})), limits));
  CHECK_THAT(error_of(map_of(raw({0x92, 0x92, 1, 2, 0x91, 3})), limits),
             Equals("text has 7 values or more, at most 6 are legal"));
  // Counted from what is claimed, before any of it is there.
  CHECK_THAT(error_of(raw({0x84}), limits), Equals("text has 8 values or more, at most 6 are legal"));
}

TEST_CASE("msgpack scan: claimed lengths beyond the input cost nothing and are named") {
  struct Case {
    std::string bytes;
    std::string error;
  };
  const Case cases[] = {
      {map_of(raw({0xC6, 0xFF, 0xFF, 0xFF, 0xFF})),
       "text has a value of 4294967295 bytes at byte 8, but 0 bytes are left"},
      {map_of(raw({0xDB, 0x00, 0x00, 0x00, 0x03, 'x', 'y'})),
       "text has a value of 3 bytes at byte 8, but 2 bytes are left"},
      {map_of(raw({0xC5, 0x01, 0x00, 'x'})), "text has a value of 256 bytes at byte 6, but 1 bytes are left"},
      {map_of(raw({0xD9, 0x02, 'x'})), "text has a value of 2 bytes at byte 5, but 1 bytes are left"},
      {map_of(raw({0xA2, 'x'})), "text has a value of 2 bytes at byte 4, but 1 bytes are left"},
      {map_of(raw({0xCF, 1, 2, 3})), "text has a value of 8 bytes at byte 4, but 3 bytes are left"},
      {map_of(raw({0xDD, 0xFF, 0xFF, 0xFF, 0xFF})),
       "text has 4294967297 values or more, at most 1048576 are legal"},
      {map_of(raw({0xDF, 0xFF, 0xFF, 0xFF, 0xFF})),
       "text has 8589934592 values or more, at most 1048576 are legal"},
      {raw({0xDF, 0xFF, 0xFF, 0xFF, 0xFF}), "text has 8589934590 values or more, at most 1048576 are legal"},
      {map_of(raw({0xDC, 0x00, 0x02, 1})), "text ends inside its map, after 7 bytes"},
      {map_of(raw({0xDC, 0x00})), "text ends inside a length, after 5 bytes"},
      {raw({0xDF, 0, 0, 0}), "text ends inside a length, after 4 bytes"},
  };
  for (const Case& one : cases) {
    CHECK_THAT(error_of(one.bytes), Equals(one.error));
  }
}

TEST_CASE("msgpack scan: every truncation and every trailing byte of a document is refused") {
  const std::string whole = packed(every_type());
  REQUIRE(scan(whole));
  for (std::size_t size = 0; size < whole.size(); ++size) {
    CAPTURE(size);
    const std::string error = error_of(whole.substr(0, size));
    REQUIRE_THAT(error, StartsWith("text ends inside ") || StartsWith("text has a value of "));
  }
  for (int extra = 0; extra < 256; ++extra) {
    CAPTURE(extra);
    REQUIRE_THAT(error_of(whole + static_cast<char>(extra)),
                 Equals(fmt::format("text has 1 bytes behind its map of {} bytes", whole.size())));
  }
}

TEST_CASE("msgpack scan: damaged documents are judged as the parser judges them") {
  const std::uint64_t seed = test::test_seed(20);
  std::cout << "seed " << seed << "\n";
  test::Rng rng(seed);
  const std::string whole = packed(every_type());
  int accepted = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string bytes = whole;
    for (std::uint64_t left = rng.between(1, 3); left > 0; --left) {
      bytes[rng.below(bytes.size())] = static_cast<char>(rng.below(256));
    }
    bytes.resize(rng.chance(1, 4) ? rng.below(bytes.size()) : bytes.size());
    CAPTURE(seed, round);
    const auto entries = scan(bytes);
    std::string parser = "accepted";
    try {
      if (!json::from_msgpack(bytes).is_object()) {
        parser = "not a map";
      }
    } catch (const json::exception& error) {
      parser = error.what();
    }
    if (entries) {
      ++accepted;
      // The one thing that the scan leaves to the parser: keys must be texts.
      REQUIRE_THAT(
          parser, Equals("accepted") || Catch::Contains("MessagePack string: expected length specification"));
    } else if (parser == "accepted") {
      REQUIRE_THAT(entries.error().message, Catch::Contains("which is not used here"));
    }
  }
  CHECK(accepted > 1000);
  CHECK(accepted < 19000);
}
