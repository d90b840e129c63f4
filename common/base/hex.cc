#include "common/base/hex.h"

#include <array>

#include "common/base/random.h"

namespace kvferry {

std::string to_hex(std::span<const std::byte> bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  out.reserve(bytes.size() * 2);
  for (const std::byte byte : bytes) {
    out += kDigits[std::to_integer<unsigned>(byte) >> 4];
    out += kDigits[std::to_integer<unsigned>(byte) & 15];
  }
  return out;
}

std::string random_hex() {
  std::array<std::byte, 16> bytes{};
  fill_random(bytes);
  return to_hex(bytes);
}

}  // namespace kvferry
