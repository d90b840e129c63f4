#pragma once
// The command line that both daemons share: --config FILE, --check-config, --print-config, --version.

#include <optional>

#include "common/daemon/config.h"

namespace kvferry {

struct CommandLine {
  std::optional<DaemonConfig> config;  // set: run with it
  int exit_code = 0;                   // otherwise: leave with this code
};

/// Prints what was asked for, or every problem of the configuration (exit code 2), before anything starts.
CommandLine read_command_line(Role role, int argc, char** argv);

}  // namespace kvferry
