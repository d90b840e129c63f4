#include "tools/cli/bench/bench.h"

#include <algorithm>
#include <chrono>
#include <fstream>
#include <optional>

#include "tools/cli/bench/bench_run.h"
#include "tools/cli/bench/compare.h"
#include "tools/cli/bench/plot.h"
#include "tools/cli/bench/report_json.h"
#include "tools/cli/bench/report_text.h"
#include "tools/cli/demo/machine.h"
#include "tools/cli/demo/progress.h"

namespace kvferry {
namespace {

constexpr int kFailed = 1;
constexpr int kWrongUsage = 2;

/// What is known to be right before anything is started.
struct Prepared {
  BenchReport report;
  std::optional<nlohmann::json> baseline;
};

Result<Prepared> prepare(const BenchOptions& options, const std::filesystem::path& program_directory) {
  Prepared out;
  KVF_TRY(out.report.matrix, bench_matrix(options));
  KVF_TRY(const std::uint64_t available, available_memory());
  if (out.report.matrix.memory > available) {
    return fail(Code::kInvalid, "the pools may have {} bytes, and {} are available; give less with --memory",
                out.report.matrix.memory, available);
  }
  if (!options.compare.empty()) {
    KVF_TRY(out.baseline, load_run(options.compare));
  }
  if (!options.plot.empty()) {
    KVF_TRY_VOID(check_plot(program_directory));
  }
  out.report.machine = machine_info();
  out.report.verify = options.verify;
  out.report.page_size = options.page_size;
  return out;
}

Result<void> write_json(const std::string& path, const nlohmann::json& run) {
  std::ofstream file(path);
  file << run.dump(1) << '\n';
  file.close();
  if (!file) {
    return fail(Code::kIo, "cannot write {}", path);
  }
  return {};
}

Result<void> plot(const BenchOptions& options, const std::filesystem::path& program_directory,
                  const nlohmann::json& run) {
  if (!options.json.empty()) {
    return draw_plot(program_directory, options.json, options.plot);
  }
  const std::string file = options.plot + ".json";
  KVF_TRY_VOID(write_json(file, run));
  auto drawn = draw_plot(program_directory, file, options.plot);
  std::error_code ignored;
  std::filesystem::remove(file, ignored);
  return drawn;
}

void run_groups(const BenchOptions& options, const std::filesystem::path& program_directory,
                BenchReport& report) {
  Progress progress;
  std::optional<std::size_t> titled;
  const BenchWatcher watcher{[&](const std::string& what) { progress.show(what); },
                             [&](const CellResult& cell) {
                               std::string text;
                               if (titled != cell.group) {
                                 text += group_head(report.matrix.groups[cell.group]);
                                 titled = cell.group;
                               }
                               progress.print(text + cell_rows(report, cell));
                             }};
  for (std::size_t group = 0; group < report.matrix.groups.size(); ++group) {
    const auto done = BenchGroupRun(options, program_directory, group, report, watcher).run();
    if (!done) {
      report.problems.push_back(done.error().message);
      break;
    }
  }
  progress.finish();
}

/// After the table: files, and the comparison.
Result<void> conclude(const BenchOptions& options, const std::filesystem::path& program_directory,
                      const std::optional<nlohmann::json>& baseline, BenchReport& report) {
  const nlohmann::json run = report_json(report);
  if (!options.json.empty()) {
    KVF_TRY_VOID(write_json(options.json, run));
  }
  if (!options.plot.empty() && report.problems.empty()) {
    KVF_TRY_VOID(plot(options, program_directory, run));
  }
  if (baseline && report.problems.empty()) {
    KVF_TRY(const Comparison comparison, compare_runs(run, *baseline, options.tolerance));
    fmt::print("\ncompared with {}, tolerance {:.2f}\n", options.compare, options.tolerance);
    for (const std::string& line : comparison.lines) {
      fmt::print("{}\n", line);
    }
    if (comparison.fallen > 0) {
      return fail(Code::kMismatch, "{} of {} ratios to memcpy fell", comparison.fallen, comparison.compared);
    }
  }
  return {};
}

}  // namespace

int run_bench(const BenchOptions& options, const std::filesystem::path& program_directory) {
  auto prepared = prepare(options, program_directory);
  if (!prepared) {
    fmt::print(stderr, "kvferry bench: {}\n", prepared.error().message);
    return kWrongUsage;
  }
  BenchReport& report = prepared->report;
  fmt::print("{}", report_head(report));
  std::fflush(stdout);
  const auto begin = std::chrono::steady_clock::now();
  const auto cpu_before = machine_cpu();
  run_groups(options, program_directory, report);
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (const auto cpu = machine_cpu(); cpu && cpu_before) {
    const double others = cpu->all - cpu_before->all - (cpu->ours - cpu_before->ours);
    report.cores_of_others = std::max(0.0, others / report.seconds);
  }
  if (!report.links.empty()) {
    fmt::print("{}{}", link_rows(report), busy_warning(report));
  }
  if (const auto concluded = conclude(options, program_directory, prepared->baseline, report); !concluded) {
    report.problems.push_back(concluded.error().message);
  }
  for (const std::string& problem : report.problems) {
    fmt::print("PROBLEM {}\n", problem);
  }
  fmt::print("\n{:.0f} s\n{}\n", report.seconds, report.problems.empty() ? "OK" : "FAILED");
  return report.problems.empty() ? 0 : kFailed;
}

}  // namespace kvferry
