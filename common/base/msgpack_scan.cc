#include "common/base/msgpack_scan.h"

#include <cstdint>
#include <vector>

namespace kvferry {
namespace {

// What follows one type byte: `skip` payload bytes, after a length field of `length_bytes` bytes that either
// counts bytes (strings, binaries) or items (arrays, maps).
struct Shape {
  std::uint64_t skip = 0;
  unsigned length_bytes = 0;
  bool counts_items = false;
  std::uint64_t items = 0;
  unsigned items_each = 1;  // maps: key and value
  bool legal = true;
};

Shape shape_of(std::uint8_t type) {
  if (type <= 0x7f || type >= 0xe0)
    return {};
  if (type <= 0x8f)
    return {.counts_items = true, .items = std::uint64_t{type} & 0x0f, .items_each = 2};
  if (type <= 0x9f)
    return {.counts_items = true, .items = std::uint64_t{type} & 0x0f};
  if (type <= 0xbf)
    return {.skip = std::uint64_t{type} & 0x1f};
  switch (type) {
    case 0xc0:
    case 0xc2:
    case 0xc3:
      return {};
    case 0xc4:
    case 0xd9:
      return {.length_bytes = 1};
    case 0xc5:
    case 0xda:
      return {.length_bytes = 2};
    case 0xc6:
    case 0xdb:
      return {.length_bytes = 4};
    case 0xc7:
      return {.skip = 1, .length_bytes = 1};
    case 0xc8:
      return {.skip = 1, .length_bytes = 2};
    case 0xc9:
      return {.skip = 1, .length_bytes = 4};
    case 0xcc:
    case 0xd0:
      return {.skip = 1};
    case 0xcd:
    case 0xd1:
      return {.skip = 2};
    case 0xca:
    case 0xce:
    case 0xd2:
      return {.skip = 4};
    case 0xcb:
    case 0xcf:
    case 0xd3:
      return {.skip = 8};
    case 0xd4:
      return {.skip = 2};
    case 0xd5:
      return {.skip = 3};
    case 0xd6:
      return {.skip = 5};
    case 0xd7:
      return {.skip = 9};
    case 0xd8:
      return {.skip = 17};
    case 0xdc:
      return {.length_bytes = 2, .counts_items = true};
    case 0xdd:
      return {.length_bytes = 4, .counts_items = true};
    case 0xde:
      return {.length_bytes = 2, .counts_items = true, .items_each = 2};
    case 0xdf:
      return {.length_bytes = 4, .counts_items = true, .items_each = 2};
    default:
      return {.legal = false};
  }
}

}  // namespace

bool msgpack_is_bounded(std::string_view bytes, std::size_t depth_max) {
  std::vector<std::uint64_t> open;  // values still to come, per nesting level
  open.push_back(1);
  std::size_t at = 0;
  while (!open.empty()) {
    if (open.back() == 0) {
      open.pop_back();
      continue;
    }
    --open.back();
    if (at >= bytes.size()) {
      return false;
    }
    const Shape shape = shape_of(static_cast<std::uint8_t>(bytes[at++]));
    if (!shape.legal || bytes.size() - at < shape.length_bytes) {
      return false;
    }
    std::uint64_t length = 0;
    for (unsigned i = 0; i < shape.length_bytes; ++i) {
      length = length << 8 | static_cast<std::uint8_t>(bytes[at++]);
    }
    if (shape.counts_items) {
      const std::uint64_t items = (shape.items + length) * shape.items_each;
      if (open.size() > depth_max || items > bytes.size() - at) {
        return false;
      }
      open.push_back(items);
      continue;
    }
    if (bytes.size() - at < shape.skip + length) {
      return false;
    }
    at += static_cast<std::size_t>(shape.skip + length);
  }
  return at == bytes.size();
}

}  // namespace kvferry
