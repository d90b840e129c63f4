#pragma once
// What a daemon uses, read from the kernel.

#include <sys/types.h>

#include <cstdint>

#include "common/base/result.h"

namespace kvferry {

/// User and system time of all threads of a process so far, seconds: what /proc/PID/stat has in ticks, in
/// nanosecond steps.
Result<double> cpu_seconds(pid_t process);

/// Bytes. Pools are shared with their engine and count as `shared` alone.
struct ResidentMemory {
  std::uint64_t own = 0;
  std::uint64_t shared = 0;
};
Result<ResidentMemory> resident_memory(pid_t process);

/// CPU seconds of the whole machine, and those of this process and of its children that have ended, so far.
struct MachineCpu {
  double all = 0;
  double ours = 0;
};
Result<MachineCpu> machine_cpu();

}  // namespace kvferry
