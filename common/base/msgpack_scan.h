#pragma once
// A check of MessagePack bytes before they are given to the JSON library, whose reader recurses once per
// nesting level: a few megabytes of "array of one" would overflow the stack of the process.

#include <cstddef>
#include <string_view>

namespace kvferry {

/// True when `bytes` is exactly one complete MessagePack value nested at most `depth_max` deep. Does not
/// recurse and does not allocate in proportion to claimed lengths.
bool msgpack_is_bounded(std::string_view bytes, std::size_t depth_max);

}  // namespace kvferry
