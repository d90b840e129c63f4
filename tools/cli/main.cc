// kvferry: the command for people.

#include <cstdio>
#include <exception>

#include "tools/cli/commands.h"

namespace {
constexpr int kWrongUsage = 2;
}

int main(int argc, char** argv) {
  try {
    CLI::App app{"KVFerry: moves KV caches between different parallel layouts"};
    app.set_version_flag("--version", KVF_VERSION);
    app.require_subcommand(1);
    int exit_status = 0;
    kvferry::add_demo_command(app, exit_status);
    kvferry::add_plan_command(app, exit_status);
    kvferry::add_bench_command(app, exit_status);
    try {
      app.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
      return app.exit(error) == 0 ? 0 : kWrongUsage;
    }
    return exit_status;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "kvferry: %s\n", error.what());
    return 1;
  }
}
