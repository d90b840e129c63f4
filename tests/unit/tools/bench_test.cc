// The parts of kvferry bench that need no daemon.

#include <catch2/catch.hpp>

#include "tools/cli/bench/bench_matrix.h"
#include "tools/cli/bench/cell_fit.h"
#include "tools/cli/bench/compare.h"
#include "tools/cli/bench/process_usage.h"
#include "tools/cli/bench/report_json.h"
#include "tools/cli/bench/report_text.h"
#include "tools/cli/bench/scrape.h"
#include "tools/cli/bench/statistics.h"

namespace kvferry {
namespace {

constexpr std::uint64_t kGiB = 1u << 30;

DemoLayout layout_of(const char* model, const char* prefill, const char* decode) {
  DemoOptions options;
  options.model = model;
  options.prefill = prefill;
  options.decode = decode;
  auto layout = demo_layout(options);
  REQUIRE(layout);
  return *layout;
}

std::string error_of(const BenchOptions& options) {
  const auto matrix = bench_matrix(options);
  return matrix ? "" : matrix.error().message;
}

/// A report of one cell whose fabrics have these ratios.
BenchReport report_of(std::vector<std::pair<std::string, double>> ratios) {
  BenchReport report;
  BenchGroup group;
  group.model = "m";
  group.layers = 2;
  group.layers_of_model = 8;
  group.layout = {"same", "tp=1", "tp=1"};
  report.matrix.groups.push_back(group);
  CellResult cell;
  cell.cell = {64, 1};
  cell.waves = 3;
  for (const auto& [fabric, ratio] : ratios) {
    report.matrix.fabrics.push_back(fabric);
    FabricResult result;
    result.fabric = fabric;
    result.to_memcpy = {ratio, ratio / 2, ratio * 2};
    cell.fabrics.push_back(result);
  }
  report.cells.push_back(cell);
  return report;
}

}  // namespace

TEST_CASE("a spread is the median and the ends, whatever the order") {
  CHECK(spread({}).median == 0);
  CHECK(spread({3}).median == 3);
  CHECK(spread({5, 1, 3}).median == 3);
  const Spread four = spread({4, 1, 10, 2});
  CHECK(four.median == 3);
  CHECK(four.min == 1);
  CHECK(four.max == 10);
}

TEST_CASE("two rates of equal work have the harmonic mean") {
  CHECK(harmonic_mean(2, 2) == 2);
  CHECK(harmonic_mean(1, 3) == Approx(1.5));
  CHECK(harmonic_mean(0, 3) == 0);
}

TEST_CASE("a counter is summed over its labels, and no other one is") {
  const std::string_view text =
      "# HELP writes_total Blocks.\n# TYPE writes_total counter\nwrites_total{fabric=\"shm\"} 12\n"
      "writes_total{fabric=\"tcp\"} 3.5e1\nwrites_total_created 7\nwrites_tota 9";
  CHECK(sum_counter(text, "writes_total") == 47);
  CHECK(sum_counter(text, "writes_tota") == 9);
  CHECK(sum_counter(text, "absent") == 0);
}

TEST_CASE("a label is read from the first sample of its metric") {
  const std::string_view text =
      "info_other{carries=\"no\"} 1\ninfo{peer=\"a b\",carries=\"posix, sysv\",x=\"1\"} "
      "1\ninfo{carries=\"later\"} 1\n";
  CHECK(label_of(text, "info", "carries") == "posix, sysv");
  CHECK(label_of(text, "info", "peer") == "a b");
  CHECK(label_of(text, "info", "arries").empty());
  CHECK(label_of(text, "absent", "carries").empty());
  CHECK(copy_threads_of("shm 12x avx512") == 12);
  for (const char* other : {"shm", "shm ", "shm 2", "shm x", "tcp 2x", ""}) {
    CHECK(copy_threads_of(other) == 0);
  }
}

TEST_CASE("the default matrix has every kind of layout, and full every sensible pair") {
  const auto matrix = bench_matrix({});
  REQUIRE(matrix);
  CHECK(matrix->name == "default");
  CHECK(matrix->fabrics.size() == 4);
  std::vector<std::string> names;
  for (const BenchGroup& group : matrix->groups) {
    names.push_back(group.model + " " + group.layout.name);
    CHECK(group.layers == 8);
  }
  CHECK(names == std::vector<std::string>{"deepseek-v3 same", "deepseek-v3 dcp1-4", "llama-3.1-70b tp4-8"});
  BenchOptions full;
  full.full = true;
  const auto whole = bench_matrix(full);
  REQUIRE(whole);
  // Of five layouts, two are for each kind of attention alone; and the mixed cell.
  CHECK(whole->groups.size() == 3 * 3 + 1);
  CHECK(whole->groups.front().cells.size() == 15);
  CHECK(whole->groups.back().cells == std::vector<BenchCell>{{1024, 256, 131072}});
}

TEST_CASE("what was asked for and makes no sense is named and left out, and nothing else left is an error") {
  BenchOptions options;
  options.models = {"llama-3.1-70b"};
  options.layouts = {"same", "dcp1-4"};
  const auto matrix = bench_matrix(options);
  REQUIRE(matrix);
  CHECK(matrix->name == "custom");
  CHECK(matrix->groups.size() == 1);
  REQUIRE(matrix->left_out.size() == 1);
  CHECK(matrix->left_out.front() == "llama-3.1-70b with --layout dcp1-4: that layout is for MLA models");
  options.layouts = {"dcp1-4"};
  CHECK(error_of(options) ==
        "nothing to run: llama-3.1-70b with --layout dcp1-4: that layout is for MLA models");
  options.models = {"nobody"};
  CHECK(error_of(options).starts_with("--model: model preset \"nobody\" is unknown; the presets are"));
  options.models = {"gpt-oss-120b"};
  options.layouts = {"same"};
  options.layers = 4;
  CHECK(error_of(options).starts_with(
      "--model gpt-oss-120b with --layers 4: gpt-oss-120b has layers of several kinds"));
  options.layers = 36;
  CHECK(error_of(options).empty());
}

TEST_CASE("sizes and numbers of rooms are combined, each once") {
  BenchOptions options;
  options.tokens = {64, 128, 64};
  options.rooms = {1, 2};
  const auto matrix = bench_matrix(options);
  REQUIRE(matrix);
  CHECK(matrix->groups.front().cells == std::vector<BenchCell>{{64, 1}, {64, 2}, {128, 1}, {128, 2}});
}

TEST_CASE("a cut model is the model with fewer layers") {
  for (const char* name : {"deepseek-v3", "deepseek-v3.2", "llama-3.1-70b", "qwen3-235b-a22b"}) {
    const auto whole = preset_geometry(name);
    REQUIRE(whole);
    const auto text = cut_model(*whole, 3);
    REQUIRE(text);
    const auto cut = geometry_from_hf_config(*text);
    REQUIRE(cut);
    CHECK(cut->kv_layers.size() == 3);
    CHECK(cut->bytes_per_token_layer() == whole->bytes_per_token_layer());
    CHECK(cut->pool_buffers(false).size() * whole->kv_layers.size() == whole->pool_buffers(false).size() * 3);
    CHECK(cut->kv_heads == whole->kv_heads);
  }
}

TEST_CASE("a cell is repeated until a round moves enough, as far as memory and rooms allow") {
  const DemoLayout layout = layout_of("deepseek-v3", "tp=1", "tp=1");
  const std::uint64_t page = 64 * layout.model.bytes_per_token();
  auto fit = fit_cell(layout, {64, 1}, 2 * kGiB, 10 * page);
  REQUIRE(fit);
  CHECK(fit->waves == 10);
  CHECK(fit->tokens == 640);
  CHECK(fit->needed_bytes == 2 * page);
  fit = fit_cell(layout, {64, 1}, 8 * page, 10 * page);
  REQUIRE(fit);
  CHECK(fit->waves == 4);
  fit = fit_cell(layout, {64, 256}, 1024 * page * 2, 1024 * page);
  REQUIRE(fit);
  CHECK(fit->waves == kRoomsPerRoundMax / 256);
  fit = fit_cell(layout, {4096, 1}, 2 * kGiB, 0);
  REQUIRE(fit);
  CHECK(fit->waves == 1);
}

TEST_CASE("a cell that does not fit says what it needs") {
  const DemoLayout layout = layout_of("deepseek-v3", "tp=1", "tp=4,dcp=4");
  const auto fit = fit_cell(layout, {131072, 16, 64}, 2 * kGiB, kGiB);
  REQUIRE(fit);
  CHECK(fit->waves == 0);
  // The room beside takes a whole unit of both sides: 256 tokens.
  CHECK(fit->needed_bytes == 2 * (16 * 131072 + 256) * layout.model.bytes_per_token());
}

TEST_CASE("a ratio that fell by more than the tolerance is found, and rates are not looked at") {
  const auto before = report_json(report_of({{"shm", 1.0}, {"tcp", 0.5}, {"gone", 1}}));
  auto now = report_of({{"shm", 0.86}, {"tcp", 0.42}, {"new", 1}});
  now.cells.front().fabrics.front().rate = {1, 1, 1};
  const auto compared = compare_runs(report_json(now), before, 0.15);
  REQUIRE(compared);
  CHECK(compared->compared == 2);
  CHECK(compared->fallen == 1);
  CHECK(compared->lines ==
        std::vector<std::string>{
            "  m 2 layers same tokens 64 rooms 1 gone: only in the baseline",
            "  m 2 layers same tokens 64 rooms 1 shm: 0.86 x memcpy, baseline 1.00",
            "  m 2 layers same tokens 64 rooms 1 tcp: 0.42 x memcpy, baseline 0.50  FELL",
            "  m 2 layers same tokens 64 rooms 1 new: 1.00 x memcpy, not in the baseline"});
  const auto looser = compare_runs(report_json(now), before, 0.2);
  REQUIRE(looser);
  CHECK(looser->fallen == 0);
}

TEST_CASE("what is no run, or has no cell in common, is refused by name") {
  const auto run = report_json(report_of({{"shm", 1.0}}));
  auto refused = compare_runs(run, nlohmann::json::array(), 0.1);
  REQUIRE_FALSE(refused);
  CHECK(refused.error().message ==
        "the baseline is no run of kvferry bench in format 1; store one with --json");
  auto without = run;
  without["cells"][0]["fabrics"][0].erase("to_memcpy");
  refused = compare_runs(run, without, 0.1);
  REQUIRE_FALSE(refused);
  CHECK(refused.error().message == "the baseline has a fabric without to_memcpy.median");
  refused = compare_runs(run, report_json(report_of({{"tcp", 1.0}})), 0.1);
  REQUIRE_FALSE(refused);
  CHECK(refused.error().message.find("no cell in common") != std::string::npos);
}

TEST_CASE("what other processes used is said where it matters") {
  BenchReport report = report_of({{"shm", 1.0}});
  report.machine.cores = 2;
  CHECK(busy_warning(report).empty());
  report.cores_of_others = 1.26;
  CHECK(busy_warning(report).find("other processes used 1.3 of 2 cores") != std::string::npos);
}

TEST_CASE("the machine has used at least as much CPU time as this process") {
  const auto cpu = machine_cpu();
  REQUIRE(cpu);
  CHECK(cpu->ours > 0);
  CHECK(cpu->all > cpu->ours / 2);  // ticks are coarse
}

TEST_CASE("a cell that was not run is in the table and in the JSON, with the reason") {
  BenchReport report = report_of({{"shm", 1.0}});
  CellResult left;
  left.cell = {131072, 256};
  left.not_run = "needs 9 GiB";
  report.cells.push_back(left);
  CHECK(cell_rows(report, report.cells.back()) == "  131072     256 not run: needs 9 GiB\n");
  const auto json = report_json(report);
  CHECK(json["cells"][1]["not_run"] == "needs 9 GiB");
  CHECK_FALSE(json["cells"][1].contains("fabrics"));
  CHECK(group_head(report.matrix.groups.front()).find("2 of 8 layers") != std::string::npos);
}

}  // namespace kvferry
