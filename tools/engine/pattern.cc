#include "tools/engine/pattern.h"

#include <cstring>

namespace kvferry {
namespace {

constexpr std::uint64_t kStep = 0x9E3779B97F4A7C15ull;
constexpr std::uint64_t kGuardSalt = 0xC3A5C85C97CB3127ull;
constexpr std::uint64_t kAuxSalt = 0xB492B66FBE98F273ull;
constexpr std::size_t kWord = sizeof(std::uint64_t);

std::uint64_t mix(std::uint64_t value) {
  value += kStep;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
  return value ^ (value >> 31);
}

PatternCheck describe(std::span<const std::byte> bytes, std::uint64_t seed) {
  PatternCheck check;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    const std::uint64_t word = seed + (i / kWord) * kStep;
    std::byte expected[kWord];
    std::memcpy(expected, &word, kWord);
    if (bytes[i] != expected[i % kWord]) {
      if (check.differing == 0) {
        check.first = i;
        check.expected = expected[i % kWord];
        check.found = bytes[i];
      }
      ++check.differing;
    }
  }
  return check;
}

}  // namespace

std::uint64_t piece_seed(const PieceCoordinate& piece) {
  const std::uint64_t where = (std::uint64_t{piece.layer} << 32) ^ piece.head;
  std::uint64_t seed = mix(piece.room);
  seed = mix(seed ^ where);
  seed = mix(seed + static_cast<std::uint64_t>(piece.kind));
  return mix(seed ^ piece.position);
}

std::uint64_t guard_seed(const GuardCoordinate& guard) {
  const std::uint64_t where = (std::uint64_t{guard.rank} << 32) ^ guard.buffer;
  return mix(mix(kGuardSalt ^ where) ^ guard.row);
}

std::uint64_t aux_seed(Room room, std::uint32_t field) {
  return mix(mix(kAuxSalt ^ room) ^ field);
}

void fill_pattern(std::span<std::byte> out, std::uint64_t seed) {
  const std::size_t words = out.size() / kWord;
  for (std::size_t i = 0; i < words; ++i) {
    const std::uint64_t word = seed + i * kStep;
    std::memcpy(out.data() + i * kWord, &word, kWord);
  }
  if (out.size() % kWord != 0) {
    const std::uint64_t tail = seed + words * kStep;
    std::memcpy(out.data() + words * kWord, &tail, out.size() % kWord);
  }
}

PatternCheck check_pattern(std::span<const std::byte> bytes, std::uint64_t seed) {
  // The common case touches every word once and branches once; only a difference pays for finding it.
  const std::size_t words = bytes.size() / kWord;
  std::uint64_t difference = 0;
  for (std::size_t i = 0; i < words; ++i) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + i * kWord, kWord);
    difference |= word ^ (seed + i * kStep);
  }
  bool tail_equal = true;
  if (bytes.size() % kWord != 0) {
    const std::uint64_t tail = seed + words * kStep;
    tail_equal = std::memcmp(bytes.data() + words * kWord, &tail, bytes.size() % kWord) == 0;
  }
  return difference == 0 && tail_equal ? PatternCheck{} : describe(bytes, seed);
}

}  // namespace kvferry
