#pragma once
// What a bench has measured. Rates are bytes per second, times seconds.

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tools/cli/bench/bench_matrix.h"
#include "tools/cli/bench/machine_info.h"
#include "tools/cli/bench/process_usage.h"
#include "tools/cli/bench/statistics.h"
#include "tools/cli/demo/demo_options.h"

namespace kvferry {

struct FabricResult {
  std::string fabric;
  Spread rate;                         // over the rounds
  Spread to_memcpy;                    // rate over that of memcpy next to it in the same round
  Spread to_kernel;                    // over that of the copy kernel on one thread,
  Spread to_kernels;                   // and on as many as shm has
  std::array<double, 2> cpu_per_gb{};  // seconds of the daemon of each side for 10^9 bytes
  double writes_per_room = 0;          // as the prefill daemon counts them
  double p50 = 0;                      // from ready pages to the landing of a room
  double p99 = 0;
  double p999 = 0;
  std::uint64_t rooms = 0;          // that the percentiles are of
  double call_p50 = 0;              // of one kvf_send, which is not part of them
  std::optional<double> p99_alone;  // of a mixed cell: without the large room; p99 is then with it
  std::uint64_t verified = 0;       // bytes compared after the timed windows
};

struct CellResult {
  std::size_t group = 0;  // of the matrix
  BenchCell cell;
  std::string not_run;  // why; empty: it was
  std::uint32_t waves = 0;
  std::uint32_t copy_threads = 1;  // that shm has
  std::uint64_t round_bytes = 0;   // that one round of one fabric moves
  std::uint64_t pieces = 0;        // that memcpy copies them in
  Spread memcpy;
  Spread kernel;            // one thread
  Spread kernels;           // as many threads as shm has
  Spread kernel_to_memcpy;  // over the memcpy right before it
  Spread kernels_to_memcpy;
  std::vector<FabricResult> fabrics;
};

/// The daemon of one side after the cells of its group.
struct DaemonUse {
  ResidentMemory memory;
  std::optional<double> idle_cpu;  // CPU seconds per second without rooms
};

struct LinkUse {
  std::size_t group = 0;
  std::string fabric;
  std::string carries;  // what really carries the bytes, as the prefill daemon's metrics say
  std::array<DaemonUse, 2> daemons;
};

struct BenchReport {
  MachineInfo machine;
  BenchMatrix matrix;
  std::string verify;            // mode of the daemons' own digests
  std::uint32_t page_size = 64;  // tokens
  std::vector<CellResult> cells;
  std::vector<LinkUse> links;
  std::vector<std::string> problems;  // a line each; any makes the bench fail
  double seconds = 0;                 // all of it
  double cores_of_others = 0;         // that other processes used meanwhile, on average
};

}  // namespace kvferry
