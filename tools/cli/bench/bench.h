#pragma once
// `kvferry bench`: rates and latencies of every fabric beside memcpy of the same rows, with real daemons.

#include <filesystem>

#include "tools/cli/bench/bench_options.h"

namespace kvferry {

/// Runs the bench and prints it; `program_directory` holds kvferry itself. The exit status: 0; 1 where a byte
/// was wrong, a room failed or a ratio fell; 2 for options that cannot be.
int run_bench(const BenchOptions& options, const std::filesystem::path& program_directory);

}  // namespace kvferry
