// kvferry: the command for people.

#include <cstdio>
#include <exception>

#include "tools/cli/commands.h"

int main(int argc, char** argv) {
  try {
    CLI::App app{"KVFerry: moves KV caches between different parallel layouts"};
    app.set_version_flag("--version", KVF_VERSION);
    app.require_subcommand(1);
    int exit_status = 0;
    kvferry::add_demo_command(app, exit_status);
    CLI11_PARSE(app, argc, argv);
    return exit_status;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "kvferry: %s\n", error.what());
    return 1;
  }
}
