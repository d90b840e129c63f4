#pragma once
// The sizes that decide how a chunk becomes puts. Plain numbers without UCX, so that what will be posted can
// be counted where nothing is sent.

#include <cstdint>

#include "transport/block_cutter.h"

namespace kvferry::ucx {

/// A piece of this size costs less as a put of its own than as a copy into staging.
inline constexpr std::uint64_t kDirectBytesMin = 16u << 10;

/// The staging ring is cut into this many slots of whole memory pages.
inline constexpr std::uint32_t kStagingSlots = 4;
inline constexpr std::uint64_t kStagingAlignment = 4096;
constexpr std::uint64_t staging_slot_bytes(std::uint64_t ring_bytes) {
  return ring_bytes / kStagingSlots / kStagingAlignment * kStagingAlignment;
}

struct PutLimits {
  std::uint64_t slot_bytes = 0;           // most that can be packed
  std::uint64_t put_bytes_max = 1 << 20;  // of a direct put
};

/// What goes by blocks beside puts: notices, aux rows, and slices that puts cannot write.
inline constexpr CutLimits kPutModeBlocks{.payload_bytes_max = 4096, .spans_max = 128};

}  // namespace kvferry::ucx
