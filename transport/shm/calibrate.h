#pragma once
// How many copy threads are worth having on this machine: one does not fill the memory's bandwidth, and
// beyond some number another only takes a core away from the engines.

#include <cstdint>
#include <functional>

namespace kvferry::shm {

/// Bytes per second of `threads` threads that copy at the same time as the fabric does, over two areas of
/// `bytes` each that are mapped for it and given back. 0 when there is no memory for them.
double measure_copy_rate(std::uint32_t threads, std::uint64_t bytes);

/// Doubles the number of threads, up to `threads_max`, for as long as that makes `rate` (bytes per second by
/// number of threads) at least a quarter higher.
std::uint32_t choose_copy_threads(std::uint32_t threads_max,
                                  const std::function<double(std::uint32_t)>& rate);

/// For half of this machine's processors at most, and 8. Takes about 0.1 s, or nothing where only one thread
/// is possible.
std::uint32_t calibrate_copy_threads();

}  // namespace kvferry::shm
