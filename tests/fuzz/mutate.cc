#include "tests/fuzz/mutate.h"

#include <algorithm>
#include <cctype>
#include <cstdint>

namespace kvferry::fuzz {
namespace {

using test::Rng;

constexpr std::uint64_t kBoundaries[] = {0,
                                         1,
                                         2,
                                         64,
                                         127,
                                         128,
                                         255,
                                         256,
                                         32767,
                                         32768,
                                         65535,
                                         65536,
                                         0x7FFFFFFF,
                                         1u << 31,
                                         0xFFFFFFFF,
                                         1ull << 32,
                                         1ull << 53,
                                         (1ull << 53) + 1,
                                         (1ull << 63) - 1,
                                         1ull << 63,
                                         UINT64_MAX - 1,
                                         UINT64_MAX};

std::uint64_t boundary(Rng& random) {
  return kBoundaries[random.below(std::size(kBoundaries))];
}

void put_number(std::string& text, Rng& random) {
  const std::size_t width = std::size_t{1} << random.below(4);
  if (text.size() < width) {
    return;
  }
  const std::size_t at = random.below(text.size() - width + 1);
  std::uint64_t value = boundary(random);
  for (std::size_t i = 0; i < width; ++i, value >>= 8) {
    text[at + i] = static_cast<char>(value & 0xFF);
  }
}

// Replaces the decimal number at or after a random place; texts without one stay.
void put_decimal(std::string& text, Rng& random) {
  static const char* const kOdd[] = {"-1", "1.5", "1e99", "", "007", "null", "\"1\"", "[]", "{}", "-0"};
  std::size_t begin = text.empty() ? 0 : random.below(text.size());
  const auto digit = [&](std::size_t i) { return std::isdigit(static_cast<unsigned char>(text[i])) != 0; };
  while (begin < text.size() && !digit(begin)) {
    ++begin;
  }
  std::size_t end = begin;
  while (end < text.size() && digit(end)) {
    ++end;
  }
  if (begin < end) {
    text.replace(
        begin, end - begin,
        random.chance(1, 3) ? kOdd[random.below(std::size(kOdd))] : std::to_string(boundary(random)));
  }
}

struct Stretch {
  std::size_t begin = 0;
  std::size_t size = 0;
};
Stretch stretch(const std::string& text, Rng& random) {
  const std::size_t begin = random.below(text.size() + 1);
  return {begin, random.below(std::min<std::size_t>(text.size() - begin, 64) + 1)};
}

void edit(std::string& text, const std::vector<std::string>& corpus, Rng& random) {
  const std::size_t at = text.empty() ? 0 : random.below(text.size());
  switch (random.below(9)) {
    case 0:
      if (!text.empty()) {
        text[at] = static_cast<char>(text[at] ^ (1 << random.below(8)));
      }
      return;
    case 1:
      if (!text.empty()) {
        text[at] = static_cast<char>(random.below(256));
      }
      return;
    case 2:
      put_number(text, random);
      return;
    case 3:
    case 4:
      put_decimal(text, random);
      return;
    case 5:
      text.resize(at);
      return;
    case 6: {
      const Stretch gone = stretch(text, random);
      text.erase(gone.begin, gone.size);
      return;
    }
    case 7: {
      const Stretch again = stretch(text, random);
      text.insert(random.below(text.size() + 1), text.substr(again.begin, again.size));
      return;
    }
    default: {
      const std::string& other = random.pick(corpus);
      text = text.substr(0, at) + other.substr(other.empty() ? 0 : random.below(other.size()));
      return;
    }
  }
}

}  // namespace

std::string mutate(const std::vector<std::string>& corpus, Rng& random) {
  std::string text = random.pick(corpus);
  for (std::uint64_t edits = random.between(1, 4); edits > 0; --edits) {
    edit(text, corpus, random);
  }
  text.resize(std::min(text.size(), kInputMax));
  return text;
}

}  // namespace kvferry::fuzz
