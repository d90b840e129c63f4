#pragma once
// What this machine has: memory that may be used, and how fast one thread copies pages in it.

#include <cstdint>

#include "common/base/result.h"

namespace kvferry {

/// MemAvailable, or what the control group leaves where that is less. Bytes.
Result<std::uint64_t> available_memory();

/// Bytes per second of memcpy of pages of `page_bytes` from random places to random places, one thread, over
/// buffers larger than the caches (256 MiB to 1 GiB each, at most an eighth of `memory`). The best of three
/// rounds.
Result<double> measure_memcpy(std::uint64_t page_bytes, std::uint64_t memory, std::uint64_t seed);

}  // namespace kvferry
