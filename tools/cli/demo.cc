// kvferry demo: both daemons, synthetic engines, a trace, and a check of every byte.

#include <memory>

#include "tools/cli/commands.h"
#include "tools/cli/demo/abort_storm.h"
#include "tools/cli/demo/demo_run.h"
#include "tools/cli/program_directory.h"

namespace kvferry {
namespace {

void add_side_options(CLI::App& command, DemoOptions& options) {
  add_layout_options(command, options);
  command.add_option("--page-size", options.page_size, "tokens of a page")
      ->check(CLI::Range(1u, 65536u))
      ->capture_default_str();
  command.add_option("--decode-page-size", options.decode_page_size, "of the decode side, where it differs")
      ->check(CLI::Range(1u, 65536u));
  command.add_option("--fabric", options.fabric, "shm, tcp, ucx (over shared memory) or ucx-tcp")
      ->check(CLI::IsMember({"shm", "tcp", "ucx", "ucx-tcp"}))
      ->capture_default_str();
}

void add_load_options(CLI::App& command, DemoOptions& options) {
  command.add_option("--trace", options.trace,
                     "requests in the Mooncake format; default: generated from the seed");
  command.add_option("--requests", options.requests, "how many requests of the trace")
      ->check(CLI::Range(std::uint64_t{1}, kTraceRowsMax))
      ->capture_default_str();
  command.add_option("--seed", options.seed, "of the trace, the page order and the corruption")
      ->capture_default_str();
  command.add_option("--concurrency", options.concurrency, "rooms in flight, as far as the pools allow")
      ->check(CLI::Range(1u, 1024u))
      ->capture_default_str();
  command
      .add_option("--chunk-tokens", options.chunk_tokens,
                  "tokens of one prefill chunk, rounded up to whole pages")
      ->check(CLI::Range(std::uint64_t{1}, kTraceTokensMax))
      ->capture_default_str();
  command
      .add_option("--layer-group", options.layer_group,
                  "prefill hands over each chunk in groups of so many layers, as they are filled; 0: whole")
      ->check(CLI::Range(0u, 1u << 20))
      ->capture_default_str();
  command.add_option("--memory", options.memory_gib, "GiB for all pools; default: 65 % of what is available")
      ->check(CLI::Range(0.001, 65536.0));
  command
      .add_option("--verify", options.verify,
                  "how much of each room the daemons compare themselves: off, sampled or full")
      ->check(CLI::IsMember({"off", "sampled", "full"}));
  command.add_flag("--dense", options.dense, "consecutive pages instead of random ones");
  command
      .add_option("--timeout", options.timeout_s, "seconds without any event after which the demo gives up")
      ->check(CLI::Range(1u, 86400u))
      ->capture_default_str();
}

void add_trial_options(CLI::App& command, DemoOptions& options) {
  command.add_flag("--corrupt", options.corrupt,
                   "flip a bit of one byte after filling: the demo must find it and fail");
  command.add_flag("--keep", options.keep, "leave configurations and logs in their directory");
  command.add_flag("--hold", options.hold, "keep the daemons (and their metrics) up until Ctrl-C");
  command
      .add_option("--abort-storm", options.abort_storm,
                  "instead of a trace: abort so many rooms in the middle of their transfer, and give their "
                  "pages to new rooms at once")
      ->check(CLI::Range(std::uint64_t{1}, std::uint64_t{1'000'000}));
  // For tests of the daemons, not part of the help.
  command.add_option("--host", options.host, "")->group("");
  command.add_flag("!--no-auth", options.auth, "")->group("");
  command.add_option("--kill", options.kill, "")->check(CLI::IsMember({"prefill", "decode"}))->group("");
  command.add_option("--kill-after", options.kill_after, "")->group("");
}

}  // namespace

void add_demo_command(CLI::App& app, int& exit_status) {
  auto options = std::make_shared<DemoOptions>();
  CLI::App* command = app.add_subcommand(
      "demo", "Both daemons with synthetic engines on this machine: replays a trace and compares every byte");
  add_side_options(*command, *options);
  add_load_options(*command, *options);
  add_trial_options(*command, *options);
  command->callback([options, &exit_status] {
    exit_status = options->abort_storm > 0 ? run_abort_storm(*options, program_directory())
                                           : run_demo(*options, program_directory());
  });
}

}  // namespace kvferry
