#pragma once
// Random bits from the kernel's cryptographic source, for epochs, generations and tokens.

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvferry {

/// Fills `out`, of any size. Aborts when the kernel has no randomness to give, which after boot does not
/// happen: a daemon whose tokens can be guessed must not run.
void fill_random(std::span<std::byte> out);
std::uint64_t random_u64();

}  // namespace kvferry
