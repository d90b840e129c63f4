#pragma once
// The one clock of the daemons: monotonic, so that a changed wall clock moves no deadline and no measurement.

#include <chrono>
#include <cstdint>

namespace kvferry {

/// Nanoseconds since an arbitrary start; only differences mean something.
inline std::int64_t steady_now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace kvferry
