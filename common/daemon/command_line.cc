#include "common/daemon/command_line.h"

#include <CLI/CLI.hpp>
#include <cstdio>

namespace kvferry {

CommandLine read_command_line(Role role, int argc, char** argv) {
  CLI::App app{role == Role::kPrefill
                   ? "kvferry-prefill: sends the KV cache of finished prefills to decode hosts"
                   : "kvferry-decode: receives the KV cache of requests from prefill hosts"};
  std::string path = fmt::format("/etc/kvferry/{}.json", to_string(role));
  bool check = false;
  bool print = false;
  app.add_option("--config", path, "configuration file (JSON, comments allowed)")->capture_default_str();
  app.add_flag("--check-config", check, "report every problem of the configuration and leave");
  app.add_flag("--print-config", print, "print the effective configuration, every key, and leave");
  app.set_version_flag("--version", fmt::format("kvferry-{} {}", to_string(role), KVF_VERSION));
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const int code = app.exit(error);
    return {.config = std::nullopt, .exit_code = code == 0 ? 0 : 2};
  }
  auto config = load_daemon_config(role, path);
  if (!config) {
    fmt::print(stderr, "{}\n", config.error().message);
    return {.config = std::nullopt, .exit_code = 2};
  }
  if (print) {
    fmt::print("{}\n", print_daemon_config(role, *config));
    return {.config = std::nullopt, .exit_code = 0};
  }
  if (check) {
    fmt::print("{}: no problems\n", path);
    return {.config = std::nullopt, .exit_code = 0};
  }
  return {.config = *std::move(config), .exit_code = 0};
}

}  // namespace kvferry
