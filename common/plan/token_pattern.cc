#include "common/plan/token_pattern.h"

#include <algorithm>
#include <numeric>

namespace kvferry {
namespace {

/// The inverse of `value` modulo `modulus` (coprime, modulus >= 1), by the extended Euclidean algorithm.
std::int64_t inverse(std::int64_t value, std::int64_t modulus) {
  std::int64_t r0 = modulus, r1 = value % modulus, t0 = 0, t1 = 1;
  while (r1 != 0) {
    const std::int64_t quotient = r0 / r1;
    r0 = std::exchange(r1, r0 - quotient * r1);
    t0 = std::exchange(t1, t0 - quotient * t1);
  }
  return t0 < 0 ? t0 + modulus : t0 % modulus;
}

}  // namespace

// Tokens are counted in blocks of gcd(interleaves): a class is then `width` neighbouring residues modulo
// width*count, and each pair of residues shares at most one residue modulo the common period.
TokenPattern token_pattern(const TokenClass& a, const TokenClass& b) {
  const std::int64_t a_interleave = a.count == 1 ? b.interleave : a.interleave;
  const std::int64_t b_interleave = b.count == 1 ? a_interleave : b.interleave;
  const std::int64_t block = std::gcd(a_interleave, b_interleave);
  const std::int64_t a_width = a_interleave / block;
  const std::int64_t b_width = b_interleave / block;
  const std::int64_t a_period = a_width * a.count;
  const std::int64_t b_period = b_width * b.count;
  const std::int64_t common = std::gcd(a_period, b_period);
  const std::int64_t a_inverse = inverse(a_period / common, b_period / common);

  std::vector<std::int64_t> blocks;
  for (std::int64_t x = a.rank * a_width; x < (std::int64_t{a.rank} + 1) * a_width; ++x) {
    for (std::int64_t y = b.rank * b_width; y < (std::int64_t{b.rank} + 1) * b_width; ++y) {
      if ((y - x) % common == 0) {
        const std::int64_t wraps = (y - x) / common % (b_period / common) * a_inverse % (b_period / common);
        blocks.push_back(x + a_period * (wraps < 0 ? wraps + b_period / common : wraps));
      }
    }
  }
  std::sort(blocks.begin(), blocks.end());

  TokenPattern pattern;
  pattern.period = static_cast<std::uint64_t>(a_period / common * b_period * block);
  for (const std::int64_t index : blocks) {
    const auto begin = static_cast<std::uint64_t>(index * block);
    if (!pattern.pieces.empty() && pattern.pieces.back().begin + pattern.pieces.back().length == begin) {
      pattern.pieces.back().length += static_cast<std::uint64_t>(block);
    } else {
      pattern.pieces.push_back({begin, static_cast<std::uint64_t>(block)});
    }
  }
  return pattern;
}

}  // namespace kvferry
