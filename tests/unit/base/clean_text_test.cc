// Text from the other end of a socket: what may pass, what becomes of the rest, and where it is cut.

#include "common/base/clean_text.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstdint>
#include <iostream>
#include <nlohmann/json.hpp>

#include "tests/support/rng.h"

using namespace kvferry;

namespace {

// Four bytes are enough for 21 bits, whatever they mean.
std::string utf8(std::uint32_t point) {
  const auto tail = [&](int shift) { return static_cast<char>(0x80 | ((point >> shift) & 0x3F)); };
  if (point < 0x80) {
    return {static_cast<char>(point)};
  }
  if (point < 0x800) {
    return {static_cast<char>(0xC0 | point >> 6), tail(0)};
  }
  if (point < 0x10000) {
    return {static_cast<char>(0xE0 | point >> 12), tail(6), tail(0)};
  }
  return {static_cast<char>(0xF0 | point >> 18), tail(12), tail(6), tail(0)};
}

// The JSON library's own judgement: it refuses to write anything but UTF-8.
bool json_writes(const std::string& text) {
  try {
    (void)nlohmann::json(text).dump();
    return true;
  } catch (const nlohmann::json::exception&) {
    return false;
  }
}

bool has_control(const std::string& text) {
  return std::any_of(text.begin(), text.end(), [](char c) { return (c >= 0 && c < 0x20) || c == 0x7F; });
}

}  // namespace

TEST_CASE("clean text: every code point but controls, surrogates and what lies beyond Unicode") {
  for (std::uint32_t point = 0; point < 0x120000; ++point) {
    const bool control = point < 0x20 || point == 0x7F;
    const bool surrogate = point >= 0xD800 && point <= 0xDFFF;
    if (is_clean_text(utf8(point)) != (!control && !surrogate && point <= 0x10FFFF)) {
      FAIL("code point " << point);
    }
  }
  CHECK(is_clean_text(""));
  CHECK(is_clean_text("bootstrap_room h\xC3\xA9 \xF0\x9F\x98\x80"));
}

TEST_CASE("clean text: each refused byte becomes one question mark") {
  CHECK(clean_text("plain h\xC3\xA9") == "plain h\xC3\xA9");
  CHECK(clean_text("a\nb\x7F") == "a?b?");
  CHECK(clean_text(std::string("a\0b", 3)) == "a?b");
  CHECK(clean_text("\xC0\xAF") == "??");                  // a longer form of '/'
  CHECK(clean_text("\xE0\x80\xAF") == "???");             // likewise
  CHECK(clean_text("\xED\xA0\x80") == "???");             // a surrogate
  CHECK(clean_text("\xF5\x80\x80\x80") == "????");        // beyond U+10FFFF
  CHECK(clean_text("\xE2\x82") == "??");                  // cut short
  CHECK(clean_text("\xE2\x82z") == "??z");                // cut short by another character
  CHECK(clean_text("\x80\xC3\xA9\x80") == "?\xC3\xA9?");  // tails without a head
}

TEST_CASE("clean text: random bytes are judged as the JSON library judges them, and cleaned for it") {
  const std::uint64_t seed = test::test_seed(21);
  std::cout << "seed " << seed << "\n";
  test::Rng rng(seed);
  const std::vector<std::uint32_t> heads = {0x41, 0x80, 0xBF, 0xC0, 0xC3, 0xE0,
                                            0xE2, 0xED, 0xF0, 0xF4, 0xF5, 0x0A};
  int clean_count = 0;
  for (int round = 0; round < 50000; ++round) {
    std::string text;
    for (std::uint64_t left = rng.below(5); left > 0; --left) {
      text.push_back(static_cast<char>(rng.chance(1, 3) ? rng.below(256) : rng.pick(heads)));
    }
    CAPTURE(seed, round);
    const bool clean = json_writes(text) && !has_control(text);
    REQUIRE(is_clean_text(text) == clean);
    const std::string cleaned = clean_text(text);
    REQUIRE(is_clean_text(cleaned));
    REQUIRE(cleaned.size() == text.size());
    REQUIRE((cleaned == text) == clean);
    clean_count += clean ? 1 : 0;
  }
  CHECK(clean_count > 5000);
  CHECK(clean_count < 45000);
}

TEST_CASE("clean text: a text is cut before a character and never inside one") {
  const std::string text = "ab\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80";  // ends of characters: 1 2 4 7 11
  const std::size_t expected[] = {0, 1, 2, 2, 4, 4, 4, 7, 7, 7, 7, 11, 11};
  for (std::size_t bytes_max = 0; bytes_max < std::size(expected); ++bytes_max) {
    CAPTURE(bytes_max);
    CHECK(cut_text(text, bytes_max) == text.substr(0, expected[bytes_max]));
  }
  CHECK(cut_text("", 0).empty());
  // Tails alone leave nothing to cut before.
  CHECK(cut_text("\x80\x80\x80", 2).empty());
}
