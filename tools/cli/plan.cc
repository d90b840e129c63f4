// kvferry plan: what a request between two layouts would move.

#include <cstdio>
#include <memory>

#include "tools/cli/commands.h"
#include "tools/cli/plan/plan_command.h"

namespace kvferry {
namespace {

void add_side_options(CLI::App& command, PlanOptions& options) {
  add_layout_options(command, options);
  command.add_option("--prefill-dp", options.prefill_dp, "prefill DP rank of the request")
      ->capture_default_str();
  command.add_option("--decode-dp", options.decode_dp, "decode DP rank of the request")
      ->capture_default_str();
  const CLI::Range page_sizes(1u, 65536u);
  command.add_option("--page-size", options.page_size, "tokens of a page, on both sides")
      ->check(page_sizes)
      ->capture_default_str();
  command.add_option("--prefill-page-size", options.prefill_page_size, "of prefill only")->check(page_sizes);
  command.add_option("--decode-page-size", options.decode_page_size, "of decode only")->check(page_sizes);
}

void add_request_options(CLI::App& command, PlanOptions& options) {
  command.add_option("--tokens", options.tokens, "of the request")->capture_default_str();
  command.add_option("--prefix", options.prefix, "tokens that decode holds already")->capture_default_str();
  command.add_option("--room", options.room, "elects the sources where several hold the same")
      ->capture_default_str();
  command.add_option("--decode-pages", options.decode_pages,
                     "pages that each decode rank gives; default: as many as needed");
  command.add_flag("--dense", options.dense, "pages are consecutive; default: no two are neighbours");
}

void add_cost_options(CLI::App& command, CostOptions& cost) {
  command
      .add_option("--fabric", cost.fabric,
                  "whose writes are timed: ucx (RDMA puts), tcp (blocks), shm (copies)")
      ->check(CLI::IsMember({"ucx", "tcp", "shm"}))
      ->capture_default_str();
  command.add_option("--gbps", cost.gigabytes_per_second, "GB/s of one source rank")
      ->check(CLI::Range(1e-3, 1e6))
      ->capture_default_str();
  command.add_option("--write-us", cost.write_us, "microseconds of one posted write")
      ->check(CLI::Range(0.0, 1e6))
      ->capture_default_str();
  command.add_option("--block-bytes", cost.blocks.payload_bytes_max, "most of one block")
      ->check(CLI::Range(std::uint64_t{1}, std::uint64_t{1} << 30))
      ->capture_default_str();
  command.add_option("--block-spans", cost.blocks.spans_max, "most source spans of one block")
      ->check(CLI::Range(1u, 1u << 20))
      ->capture_default_str();
  command.add_option("--staging", cost.staging_bytes, "bytes of a source's ring for packing before puts")
      ->check(CLI::Range(std::uint64_t{64} << 10, std::uint64_t{2} << 20))
      ->capture_default_str();
}

void add_output_options(CLI::App& command, PlanOptions& options) {
  command.add_flag("--pages", options.pages, "show source and destination rows as runs");
  command.add_option("--explain", options.explain, "say where this token lies and who sends it to whom");
  command.add_option("--limit", options.limit, "lines of each list, 0 for all")->capture_default_str();
  command.add_flag("--json", options.json, "one JSON document (fields: tools/cli/plan/plan_json.h)");
}

}  // namespace

void add_plan_command(CLI::App& app, int& exit_status) {
  auto options = std::make_shared<PlanOptions>();
  CLI::App* command = app.add_subcommand(
      "plan", "What a request between two layouts would move: bytes, writes, time; no daemon is needed");
  command->footer("Exit status: 0 supported, 1 not supported (every reason is listed), 2 wrong usage.");
  add_side_options(*command, *options);
  add_request_options(*command, *options);
  add_cost_options(*command, options->cost);
  add_output_options(*command, *options);
  command->callback([options, &exit_status] {
    const PlanOutput output = run_plan(*options);
    std::fputs(output.text.c_str(), stdout);
    std::fputs(output.error.c_str(), stderr);
    exit_status = output.exit_status;
  });
}

}  // namespace kvferry
