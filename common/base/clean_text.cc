#include "common/base/clean_text.h"

#include <cstdint>

namespace kvferry {

namespace {

bool is_tail(char byte) {
  return (static_cast<unsigned char>(byte) & 0xC0) == 0x80;
}

// Bytes of the clean character at the start of `text`; 0 when there is none.
std::size_t clean_length(std::string_view text) {
  const auto first = static_cast<unsigned char>(text[0]);
  if (first < 0x80) {
    return first >= 0x20 && first != 0x7F ? 1 : 0;
  }
  std::size_t length = 0;
  std::uint32_t point = 0;
  std::uint32_t smallest = 0;
  if (first >= 0xC2 && first <= 0xDF) {
    length = 2, point = first & 0x1Fu, smallest = 0x80;
  } else if (first >= 0xE0 && first <= 0xEF) {
    length = 3, point = first & 0x0Fu, smallest = 0x800;
  } else if (first >= 0xF0 && first <= 0xF4) {
    length = 4, point = first & 0x07u, smallest = 0x10000;
  } else {
    return 0;
  }
  if (text.size() < length) {
    return 0;
  }
  for (std::size_t i = 1; i < length; ++i) {
    if (!is_tail(text[i])) {
      return 0;
    }
    point = point << 6 | (static_cast<unsigned char>(text[i]) & 0x3Fu);
  }
  const bool surrogate = point >= 0xD800 && point <= 0xDFFF;
  return point < smallest || point > 0x10FFFF || surrogate ? 0 : length;
}

}  // namespace

bool is_clean_text(std::string_view text) {
  while (!text.empty()) {
    const std::size_t length = clean_length(text);
    if (length == 0) {
      return false;
    }
    text.remove_prefix(length);
  }
  return true;
}

std::string clean_text(std::string_view text) {
  std::string clean;
  clean.reserve(text.size());
  while (!text.empty()) {
    const std::size_t length = clean_length(text);
    if (length == 0) {
      clean.push_back('?');
      text.remove_prefix(1);
    } else {
      clean.append(text.substr(0, length));
      text.remove_prefix(length);
    }
  }
  return clean;
}

std::string_view cut_text(std::string_view text, std::size_t bytes_max) {
  if (text.size() <= bytes_max) {
    return text;
  }
  std::size_t end = bytes_max;
  while (end > 0 && is_tail(text[end])) {
    --end;
  }
  return text.substr(0, end);
}

}  // namespace kvferry
