#pragma once
// The subcommands of `kvferry`. Each adds itself to the application with its options; its callback runs the
// subcommand and writes the exit status.

#include <CLI/CLI.hpp>

namespace kvferry {

void add_bench_command(CLI::App& app, int& exit_status);
void add_demo_command(CLI::App& app, int& exit_status);
void add_plan_command(CLI::App& app, int& exit_status);

}  // namespace kvferry
