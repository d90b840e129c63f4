#pragma once
// Bytes as lower-case hexadecimal digits, two a byte.

#include <cstddef>
#include <span>
#include <string>

namespace kvferry {

std::string to_hex(std::span<const std::byte> bytes);
/// 16 random bytes in this form, for tokens and nonces.
std::string random_hex();

}  // namespace kvferry
