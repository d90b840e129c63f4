// kvferry bench: what each fabric reaches on this machine, beside memcpy of the same rows.

#include <memory>

#include "tools/cli/bench/bench.h"
#include "tools/cli/commands.h"
#include "tools/cli/program_directory.h"

namespace kvferry {
namespace {

void add_matrix_options(CLI::App& command, BenchOptions& options) {
  CLI::Option* quick = command.add_flag("--quick", options.quick, "a few cells, in half a minute");
  command.add_flag("--full", options.full, "every model, layout and size, and the mixed cell")
      ->excludes(quick);
  command.add_option("--model", options.models, "preset names or paths of a config.json")->delimiter(',');
  command.add_option("--layout", options.layouts, "same, tp4-8, tp8-2, dcp1-4, dcp1-8")
      ->delimiter(',')
      ->check(CLI::IsMember({"same", "tp4-8", "tp8-2", "dcp1-4", "dcp1-8"}));
  command.add_option("--fabric", options.fabrics, "shm, tcp, ucx (over shared memory), ucx-tcp")
      ->delimiter(',')
      ->check(CLI::IsMember({"shm", "tcp", "ucx", "ucx-tcp"}));
  command.add_option("--tokens", options.tokens, "sizes of a room")
      ->delimiter(',')
      ->check(CLI::Range(std::uint64_t{1}, std::uint64_t{16'777'216}));
  command.add_option("--rooms", options.rooms, "rooms in flight at once")
      ->delimiter(',')
      ->check(CLI::Range(1u, 1024u));
  command
      .add_option("--layers", options.layers,
                  "layers that models are cut to, so that many tokens fit; default 8")
      ->check(CLI::Range(1u, 4096u));
  command.add_flag("--mix", options.mix, "also 256 rooms of 1024 tokens beside one of 131072");
  command.add_flag("--idle", options.idle, "also what idle daemons use, in 10 s after each group");
}

void add_measure_options(CLI::App& command, BenchOptions& options) {
  command.add_option("--rounds", options.rounds, "rounds that count; default 5")
      ->check(CLI::Range(1u, 1000u));
  command
      .add_option("--memory", options.memory_gib,
                  "GiB for the pools of both sides; default 5, with --quick 1")
      ->check(CLI::Range(0.01, 65536.0));
  command.add_option("--page-size", options.page_size, "tokens of a page")
      ->check(CLI::Range(1u, 65536u))
      ->capture_default_str();
  command.add_option("--copy-threads", options.copy_threads, "of shm; default: the daemon's")
      ->check(CLI::Range(1u, 64u));
  command.add_option("--verify", options.verify, "what the daemons compare themselves: off, sampled or full")
      ->check(CLI::IsMember({"off", "sampled", "full"}))
      ->capture_default_str();
  command.add_option("--seed", options.seed, "of the page order")->capture_default_str();
}

void add_output_options(CLI::App& command, BenchOptions& options) {
  command.add_option("--json", options.json, "file for the results");
  command.add_option("--plot", options.plot, "SVG file for a chart; needs matplotlib");
  command
      .add_option("--compare", options.compare,
                  "a run that --json stored: fails when a ratio to memcpy has fallen")
      ->check(CLI::ExistingFile);
  command.add_option("--tolerance", options.tolerance, "share by which it may fall")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
}

}  // namespace

void add_bench_command(CLI::App& app, int& exit_status) {
  auto options = std::make_shared<BenchOptions>();
  CLI::App* command = app.add_subcommand(
      "bench", "Rates and latencies of every fabric with real daemons, beside memcpy of the same rows");
  add_matrix_options(*command, *options);
  add_measure_options(*command, *options);
  add_output_options(*command, *options);
  command->callback([options, &exit_status] { exit_status = run_bench(*options, program_directory()); });
}

}  // namespace kvferry
