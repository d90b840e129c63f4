// The codec alone: what is encoded comes back, and everything else is an error with a name.

#include "common/engine/wire.h"

#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>

#include "tests/unit/engine/engine_fixture.h"

using namespace kvferry;
using nlohmann::json;

namespace {

std::span<const std::byte> body_of(const std::string& frame) {
  return std::as_bytes(std::span(frame)).subspan(kFrameHeaderBytes);
}

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

std::string packed(const json& value) {
  const auto bytes = json::to_msgpack(value);
  return {bytes.begin(), bytes.end()};
}

std::string send_error(const json& map) {
  const std::string body = packed(map);
  const auto envelope = wire::open(bytes_of(body));
  if (!envelope) {
    return envelope.error().message;
  }
  const auto send = wire::decode_send(*envelope);
  return send ? "" : std::string(to_string(send.error().code)) + ": " + send.error().message;
}

json good_send() {
  return {{"op", "send"},
          {"seq", 4},
          {"fds", 0},
          {"room", 7},
          {"pages", json::binary({1, 0, 0, 0})},
          {"first_token", 0},
          {"token_count", 16},
          {"last", true},
          {"begun", false},
          {"aux_slot", -1},
          {"window_pages", json::binary({2, 0, 0, 0})},
          {"window_first", 16},
          {"state_slot", 3},
          {"layer_begin", 4},
          {"layer_end", 8}};
}

}  // namespace

TEST_CASE("an attach comes back with every field") {
  wire::Attach attach = test::small_attach();
  attach.coord = RankCoord{1, 2, 3, 4};
  attach.layout.buffers.push_back({BufferShape{60, BufferKind::kValue, 4096, 1u << 31}, 1, 1ull << 50});
  const std::string frame = wire::encode(9, attach, 2);
  const auto envelope = wire::open(body_of(frame));
  REQUIRE(envelope);
  CHECK(envelope->op == wire::Op::kAttach);
  CHECK(envelope->seq == 9);
  CHECK(envelope->fds == 2);
  const auto decoded = wire::decode_attach(*envelope);
  REQUIRE(decoded);
  CHECK(decoded->coord == attach.coord);
  CHECK(decoded->dtype == "bf16");
  CHECK(decoded->layout.page_size == 16);
  REQUIRE(decoded->layout.buffers.size() == 2);
  CHECK(decoded->layout.buffers[1].shape == attach.layout.buffers[1].shape);
  CHECK(decoded->layout.buffers[1].fd == 1);
  CHECK(decoded->layout.buffers[1].offset == 1ull << 50);
  REQUIRE(decoded->layout.aux.size() == 1);
  CHECK(decoded->layout.aux[0].name == kAuxRoomField);
  CHECK(decoded->layout.aux[0].slots == 4);
}

TEST_CASE("a send comes back with every field") {
  const wire::Send send{kRoomMax, {0, UINT32_MAX},   64, 1000,      true, 3,
                        true,     {{9, 11}, 896, 3}, 30, UINT32_MAX};
  const auto envelope = wire::open(body_of(wire::encode(9, send, 1)));
  REQUIRE(envelope);
  const auto decoded = wire::decode_send(*envelope);
  REQUIRE(decoded);
  CHECK(decoded->room == kRoomMax);
  CHECK(decoded->pages == send.pages);
  CHECK(decoded->first_token == 64);
  CHECK(decoded->token_count == 1000);
  CHECK(decoded->last);
  CHECK(decoded->aux_slot == 3);
  CHECK(decoded->begun);
  CHECK(decoded->hybrid == send.hybrid);
  CHECK(decoded->layer_begin == 30);
  CHECK(decoded->layer_end == UINT32_MAX);
}

TEST_CASE("an event comes back with every field, a long reason cut between characters") {
  wire::Event event{4, kRoomMax, 1ull << 40, ~0ull, 123456789, 11, std::string(510, 'x') + "\xC3\xA9", 61};
  const std::string frame = wire::encode(event);
  const auto envelope = wire::open(body_of(frame));
  REQUIRE(envelope);
  const auto decoded = wire::decode_event(*envelope);
  REQUIRE(decoded);
  CHECK(decoded->type == 4);
  CHECK(decoded->room == kRoomMax);
  CHECK(decoded->tokens == 1ull << 40);
  CHECK(decoded->bytes == ~0ull);
  CHECK(decoded->transfer_ns == 123456789);
  CHECK(decoded->code == 11);
  CHECK(decoded->reason == std::string(510, 'x'));
  CHECK(decoded->layer_end == 61);
}

TEST_CASE("a send with one wrong, missing, unknown or illegal field is refused by the field's name") {
  CHECK(send_error(good_send()) == "");
  const auto with = [](const char* key, const json& value) {
    json map = good_send();
    map[key] = value;
    return send_error(map);
  };
  CHECK(with("room", 0) == "invalid: room is 0, legal are 1 to 9223372036854775807 (2^63-1)");
  CHECK(with("room", 1ull << 63) ==
        "invalid: room is 9223372036854775808, legal are 1 to 9223372036854775807 (2^63-1)");
  CHECK(with("room", "7") == "protocol: room is string, wanted an integer");
  CHECK(with("room", 7.0) == "protocol: room is number, wanted an integer");
  CHECK(with("pages", json::array({1, 2})) ==
        "protocol: pages is array, wanted a binary of little-endian uint32");
  CHECK(with("pages", json::binary({1, 2, 3})) ==
        "protocol: pages has 3 bytes, which is not a multiple of 4");
  CHECK(with("last", 1) == "protocol: last is number, wanted a boolean");
  CHECK(with("aux_slot", -2) == "invalid: aux_slot is -2, legal are -1 (none) to 2147483647");
  CHECK(with("aux_slot", 1ull << 63) ==
        "invalid: aux_slot is 9223372036854775808, legal are -1 (none) to 2147483647");
  CHECK(with("first_token", -1) == "invalid: first_token is -1, at least 0 is legal");
  CHECK(with("layer_begin", -1) == "invalid: layer_begin is -1, at least 0 is legal");
  CHECK(with("layer_end", 1ull << 32) == "invalid: layer_end is 4294967296, at most 4294967295 is legal");
  CHECK(with("extra", 1) == "protocol: extra is not a known key");
  CHECK(with("op", "push") == "op is \"push\", known are attach, send, expect, abort, detach, reply, event");
  json missing = good_send();
  missing.erase("token_count");
  CHECK(send_error(missing) == "protocol: token_count is missing");
  missing = good_send();
  missing.erase("layer_end");
  CHECK(send_error(missing) == "protocol: layer_end is missing");
}

TEST_CASE("a repeated key is refused") {
  std::string exact(
      "\x84\xA2op\xA6"
      "detach\xA3seq\x01\xA3"
      "fds",
      20);
  exact.push_back('\0');
  exact += "\xA3seq\x02";
  const auto envelope = wire::open(bytes_of(exact));
  REQUIRE_FALSE(envelope);
  CHECK(envelope.error().message == "frame repeats a key: 4 entries, 3 different keys");
}

TEST_CASE("an attach of another protocol number names both") {
  wire::Attach attach = test::small_attach();
  attach.protocol = 2;
  const std::string frame = wire::encode(1, attach, 1);
  const auto envelope = wire::open(body_of(frame));
  REQUIRE(envelope);
  const auto decoded = wire::decode_attach(*envelope);
  REQUIRE_FALSE(decoded);
  CHECK(decoded.error().code == Code::kMismatch);
  CHECK_THAT(decoded.error().message, Catch::Contains("protocol 2, this daemon 1"));
}

TEST_CASE("every truncation of a frame's body is an error") {
  const std::string frame = wire::encode(9, test::small_attach(), 1);
  const auto body = body_of(frame);
  REQUIRE(wire::open(body));
  for (std::size_t size = 0; size < body.size(); ++size) {
    CAPTURE(size);
    REQUIRE_FALSE(wire::open(body.first(size)));
  }
}

TEST_CASE("depth, value and length bombs are refused before they are parsed") {
  const auto error_of = [](const std::string& body) {
    const auto envelope = wire::open(bytes_of(body));
    return envelope ? std::string() : envelope.error().message;
  };
  CHECK_THAT(error_of("\x81\xA1"
                      "a" +
                      std::string(1u << 20, '\x91')),
             Catch::Contains("nested deeper than 4"));
  CHECK_THAT(error_of(std::string("\x81\xA1"
                                  "a\xDD\x7F\xFF\xFF\xFF",
                                  8)),
             Catch::Contains("values or more"));
  CHECK_THAT(error_of(std::string("\x81\xA1"
                                  "a\xC6\xFF\xFF\xFF\xFF",
                                  8)),
             Catch::Contains("has a value of 4294967295 bytes"));
  CHECK_THAT(error_of(std::string("\xDF\xFF\xFF\xFF\xFF", 5)), Catch::Contains("values or more"));
  CHECK_THAT(error_of(std::string("\x81\xA1"
                                  "a\xC7\x01\x05\x00",
                                  7)),
             Catch::Contains("type 0xc7"));
  CHECK_THAT(error_of("\x80\x80"), Catch::Contains("1 bytes behind its map"));
  CHECK_THAT(error_of("\x90"), Catch::Contains("not a MessagePack map"));
}

TEST_CASE("frames are cut from a stream that arrives byte by byte") {
  const std::string stream = test::frame_of("abc") + test::frame_of("d");
  FrameBuffer frames(16);
  std::string seen;
  for (const char byte : stream) {
    frames.append(bytes_of(std::string(1, byte)));
    auto next = frames.next();
    REQUIRE(next);
    if (next->has_value()) {
      seen.append(reinterpret_cast<const char*>((*next)->data()), (*next)->size());
      seen.push_back('|');
    }
  }
  CHECK(seen == "abc|d|");
  CHECK(frames.empty());
  frames.append(bytes_of(std::string("\x11\0\0\0", 4)));
  CHECK_FALSE(frames.next());
}
