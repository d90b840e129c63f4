#pragma once
// Deterministic mutations of a corpus, for runs without libFuzzer: the same seed makes the same inputs on
// every machine. Blind to coverage, so they start from inputs that parsers accept.

#include <string>
#include <vector>

#include "tests/support/rng.h"

namespace kvferry::fuzz {

inline constexpr std::size_t kInputMax = std::size_t{64} << 10;

/// One to four edits of a random entry: a bit, a byte, a little-endian or decimal number of a boundary value,
/// a cut, a removed or repeated stretch, or a splice with another entry.
std::string mutate(const std::vector<std::string>& corpus, test::Rng& random);

}  // namespace kvferry::fuzz
