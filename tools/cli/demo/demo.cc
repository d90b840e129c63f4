// The order of a run: layouts, trace, memory, processes, replay, table. Each step prints what it decided.

#include <algorithm>

#include "common/plan/plan.h"
#include "tools/cli/demo/demo_run.h"
#include "tools/cli/demo/machine.h"

namespace kvferry {
namespace {

constexpr double kMemoryShare = 0.65;

Result<std::vector<TraceRequest>> requests_of(const DemoOptions& options) {
  if (!options.trace.empty()) {
    return load_trace(options.trace, options.requests);
  }
  return generate_trace(options.requests, options.seed);
}

// Enough for the rooms that may be in flight at once; more would only take longer to set up.
std::uint64_t wanted_tokens(const DemoOptions& options, const std::vector<TraceRequest>& trace,
                            std::uint64_t unit) {
  std::vector<std::uint64_t> sizes;
  sizes.reserve(trace.size());
  for (const TraceRequest& request : trace) {
    sizes.push_back((request.input_tokens + unit - 1) / unit * unit);
  }
  std::sort(sizes.rbegin(), sizes.rend());
  sizes.resize(std::min<std::size_t>(sizes.size(), options.concurrency));
  std::uint64_t total = 0;
  for (const std::uint64_t size : sizes) {
    total += size;
  }
  return total;
}

std::uint64_t memcpy_page(const DemoLayout& layout) {
  return std::uint64_t{layout.prefill_page_size} *
         rank_buffers(layout.model, layout.prefill, layout.prefill.coord(0), 1).front().row_bytes;
}

Result<PoolSizes> size_pools(const DemoOptions& options, const DemoLayout& layout,
                             const std::vector<TraceRequest>& trace, std::uint64_t memory) {
  const double budget = options.memory_gib > 0 ? options.memory_gib * 1024 * 1024 * 1024
                                               : kMemoryShare * static_cast<double>(memory);
  const std::uint64_t unit = layout.unit_tokens();
  KVF_TRY(const PoolSizes pools,
          pool_sizes(layout, wanted_tokens(options, trace, unit), static_cast<std::uint64_t>(budget)));
  fmt::print("pools    {} for {} tokens in flight: {} pages on each prefill rank, {} on each decode rank\n",
             format_bytes(pools.bytes), pools.tokens, pools.prefill_pages, pools.decode_pages);
  return pools;
}

void print_setup(const DemoOptions& options, const DemoLayout& layout,
                 const std::vector<TraceRequest>& trace) {
  std::uint64_t longest = 0;
  for (const TraceRequest& request : trace) {
    longest = std::max(longest, request.input_tokens);
  }
  const ModelGeometry& model = layout.model;
  std::string layers = fmt::format("{} full", model.kv_layers.size());
  for (const auto& [name, count] : {std::pair{"sliding", model.sliding_layers.size()},
                                    {"linear", model.state_layers.size()},
                                    {"draft", std::size_t{model.draft_layers}}}) {
    layers += count > 0 ? fmt::format(", {} {}", count, name) : "";
  }
  const std::string pages = layout.prefill_page_size == layout.decode_page_size
                                ? fmt::format("{}", layout.prefill_page_size)
                                : fmt::format("{} to {}", layout.prefill_page_size, layout.decode_page_size);
  fmt::print("model    {} ({}, {}; layers: {}), prefill {} to decode {}, pages of {} tokens, fabric {}\n",
             model.name, to_string(model.attention), to_string(model.dtype), layers,
             to_string(layout.prefill), to_string(layout.decode), pages, options.fabric);
  fmt::print(
      "trace    {}: {} requests, longest {} tokens, seed {}, {} rooms at once, chunks of {} tokens{}\n",
      options.trace.empty() ? "generated" : options.trace, trace.size(), longest, options.seed,
      options.concurrency, options.chunk_tokens,
      options.layer_group > 0 ? fmt::format(" in groups of {} layers", options.layer_group) : "");
}

void print_end(const DemoOptions& options, const DemoCluster& cluster, const DemoResults& results,
               const PoolSizes& pools, std::uint64_t memory) {
  std::vector<std::string> metrics;
  for (const Side side : {Side::kPrefill, Side::kDecode}) {
    metrics.push_back(fmt::format("http://{}/metrics ({} daemon{})", cluster.metrics(side), side_name(side),
                                  options.hold ? "" : ", while it ran; --hold keeps it up"));
  }
  if (results.clipped > 0) {
    fmt::print("{} of {} requests clipped to {} tokens: {}\n", results.clipped, results.requests_wanted,
               pools.tokens,
               options.memory_gib > 0
                   ? fmt::format("--memory allows {}", format_bytes(pools.bytes))
                   : fmt::format(
                         "this machine has {} of memory available, and the pools take at most {:.0f} % of it",
                         format_bytes(memory), 100 * kMemoryShare));
  }
  fmt::print("\n{}", results_table(results, metrics));
  if (options.keep) {
    fmt::print("  {:<12} {}\n", "files", cluster.directory().string());
  }
  for (const std::string& problem : results.problems) {
    fmt::print("PROBLEM {}\n", problem);
  }
  if (results.leaked_pages + results.leaked_slots > 0) {
    fmt::print("LEAK {} pages and {} aux slots did not come back\n", results.leaked_pages,
               results.leaked_slots);
  }
  std::fflush(stdout);
}

Result<bool> run_all(const DemoOptions& options, const std::filesystem::path& program_directory) {
  KVF_TRY(const DemoLayout layout, demo_layout(options));
  KVF_TRY(const auto trace, requests_of(options));
  print_setup(options, layout, trace);
  KVF_TRY(const std::uint64_t memory, available_memory());
  DemoResults results;
  results.memcpy_page = memcpy_page(layout);
  KVF_TRY(results.memcpy_rate, measure_memcpy(results.memcpy_page, memory, options.seed));
  KVF_TRY(const PoolSizes pools, size_pools(options, layout, trace, memory));
  std::fflush(stdout);
  KVF_TRY(const auto cluster, DemoCluster::create(options, layout, pools, program_directory));
  DemoRun run(options, layout, trace, pools, results);
  auto done = run.run(*cluster);
  if (!done) {
    results.problems.push_back(done.error().message);
  } else if (options.hold) {
    fmt::print("the daemons stay up until Ctrl-C: http://{}/metrics, http://{}/metrics\n",
               cluster->metrics(Side::kPrefill), cluster->metrics(Side::kDecode));
    std::fflush(stdout);
    cluster->wait_for_interrupt();
  }
  const bool interrupted = !done && done.error().code == Code::kAborted;
  const auto stopped = cluster->stop();
  if (!stopped && !interrupted) {
    results.problems.push_back(stopped.error().message);
  }
  if (options.corrupt && results.mismatches == 0) {
    results.problems.push_back("the byte that was corrupted on purpose was not found");
  }
  print_end(options, *cluster, results, pools, memory);
  return results.good();
}

}  // namespace

int run_demo(const DemoOptions& options, const std::filesystem::path& program_directory) {
  const auto good = run_all(options, program_directory);
  if (!good) {
    fmt::print(stderr, "kvferry demo: {}\n", good.error().message);
    return 1;
  }
  fmt::print("\n{}\n", *good ? "OK" : "FAILED");
  return *good ? 0 : 1;
}

}  // namespace kvferry
