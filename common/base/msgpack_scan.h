#pragma once
// A check of MessagePack bytes before they are given to the JSON library, whose reader recurses once per
// nesting level and takes the last of two equal keys: a few megabytes of "array of one" would overflow the
// stack of the process.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "common/base/result.h"

namespace kvferry {

struct MsgpackLimits {
  std::size_t depth_max = 0;     // containers inside containers, the outer map included
  std::uint64_t values_max = 0;  // keys and values of all containers together
};

/// Accepts exactly one MessagePack map within `limits`, without extension types, all lengths inside `bytes`,
/// and nothing behind it. Returns the map's entry count, so that repeated keys can be told: the parsed map
/// then has fewer. Does not recurse, and allocates for `depth_max` levels only, whatever the bytes claim.
/// Errors (kProtocol) begin with `what`, which names the bytes: "frame", "control message".
Result<std::uint32_t> check_msgpack_map(std::span<const std::byte> bytes, const MsgpackLimits& limits,
                                        std::string_view what);

}  // namespace kvferry
