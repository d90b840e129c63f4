#pragma once
// kvferry demo --abort-storm N: both engines in one process, so that no time passes between the final event
// of an aborted room and the next use of its pages.
//
// Each round: room A moves; when a byte at a random place of its destination has arrived, one of the engines
// (they take turns) aborts it. At A's final event decode expects room B in every second page of A, and
// prefill fills and sends B from pages of A. B has to land, and every byte of it is compared. The other pages
// of A must not change any more after A's final event: they are hashed then and when B has landed.

#include <filesystem>

#include "tools/cli/demo/demo_options.h"

namespace kvferry {

/// Returns the exit status: 0, or 1 on any wrong byte, or a room that did not end as it must.
int run_abort_storm(DemoOptions options, const std::filesystem::path& program_directory);

}  // namespace kvferry
