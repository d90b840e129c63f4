#include "tools/cli/bench/bench_run.h"

#include <poll.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <utility>

#include "tools/cli/bench/cell_fit.h"
#include "tools/cli/bench/cell_run.h"
#include "tools/cli/bench/scrape.h"

namespace kvferry {
namespace {

constexpr std::chrono::seconds kIdleWindow{10};
constexpr std::uint64_t kGiB = 1u << 30;

std::string describe(const BenchCell& cell) {
  return fmt::format("{} room{} of {} tokens{}", cell.rooms, cell.rooms == 1 ? "" : "s", cell.tokens,
                     cell.beside > 0 ? fmt::format(" beside one of {}", cell.beside) : "");
}

}  // namespace

Result<void> BenchGroupRun::run() {
  KVF_TRY(layout_, demo_layout(cluster_options(report_.matrix.fabrics.front())));
  PoolSizes pools;
  std::uint32_t slots = 0;
  KVF_TRY(const auto cells, fit_cells(pools, slots));
  if (cells.empty()) {
    return {};
  }
  watcher_.doing(fmt::format("{} {}: starting {} pairs of daemons", group().model, group().layout.name,
                             report_.matrix.fabrics.size()));
  KVF_TRY_VOID(start(pools, slots));
  KVF_TRY_VOID(warm_up(cells.front().cell.tokens));
  for (const FittingCell& cell : cells) {
    KVF_TRY_VOID(measure_cell(cell));
  }
  KVF_TRY_VOID(note_daemons());
  return stop();
}

DemoOptions BenchGroupRun::cluster_options(const std::string& fabric) const {
  DemoOptions options;
  options.model = group().model;
  options.model_text = group().model_text;
  options.prefill = group().layout.prefill;
  options.decode = group().layout.decode;
  options.page_size = options_.page_size;
  options.fabric = fabric;
  options.verify = options_.verify;
  options.copy_threads = options_.copy_threads;
  return options;
}

// Those that do not fit are reported at once.
Result<std::vector<BenchGroupRun::FittingCell>> BenchGroupRun::fit_cells(PoolSizes& pools,
                                                                         std::uint32_t& slots) {
  std::vector<FittingCell> cells;
  std::uint64_t tokens = 0;
  const std::uint64_t budget = report_.matrix.memory;
  for (const BenchCell& cell : group().cells) {
    KVF_TRY(const CellFit fit, fit_cell(layout_, cell, budget, report_.matrix.batch_bytes));
    if (fit.waves == 0) {
      CellResult result;
      result.group = group_;
      result.cell = cell;
      result.not_run =
          fmt::format("needs {:.1f} GiB for the pools of both sides, and --memory allows {:.1f}",
                      static_cast<double>(fit.needed_bytes) / kGiB, static_cast<double>(budget) / kGiB);
      watcher_.done(result);
      report_.cells.push_back(std::move(result));
      continue;
    }
    cells.push_back({cell, fit.waves});
    tokens = std::max(tokens, fit.tokens);
    slots = std::max(slots, fit.waves * (cell.rooms + (cell.beside > 0 ? 1 : 0)));
  }
  if (!cells.empty()) {
    KVF_TRY(pools, pool_sizes(layout_, tokens, budget));
  }
  return cells;
}

Result<void> BenchGroupRun::start(const PoolSizes& pools, std::uint32_t slots) {
  for (const Side side : {Side::kPrefill, Side::kDecode}) {
    KVF_TRY(BenchSide made, BenchSide::create(layout_, side, pools.pages(side), slots, options_.seed));
    (side == Side::kPrefill ? prefill_ : decode_) = std::make_unique<BenchSide>(std::move(made));
  }
  for (const std::string& fabric : report_.matrix.fabrics) {
    KVF_TRY(auto link, BenchLink::start(cluster_options(fabric), layout_, pools, program_directory_));
    links_.push_back(std::move(link));
    KVF_TRY_VOID(links_.back()->attach(*prefill_));
    KVF_TRY_VOID(links_.back()->attach(*decode_));
  }
  return {};
}

// The first room makes the daemons connect; then they say what carries its bytes.
Result<void> BenchGroupRun::warm_up(std::uint64_t tokens) {
  const std::vector<BenchRoom> rooms = place_rooms(layout_, {tokens, 1}, 1);
  prefill_->fill(rooms);
  for (const auto& link : links_) {
    KVF_TRY_VOID(run_wave(*link, layout_, *prefill_, *decode_, rooms, next_room_++));
    KVF_TRY(const std::string metrics, scrape(link->cluster().metrics(Side::kPrefill)));
    carries_.push_back(label_of(metrics, "kvferry_peer_fabric_info", "carries"));
    copy_threads_ = std::max(copy_threads_, copy_threads_of(carries_.back()));
  }
  return {};
}

Result<void> BenchGroupRun::measure_cell(const FittingCell& cell) {
  watcher_.doing(fmt::format("{} {}: {}", group().model, group().layout.name, describe(cell.cell)));
  CellResult result;
  result.group = group_;
  result.cell = cell.cell;
  result.copy_threads = copy_threads_;
  CellRun run({layout_, *prefill_, *decode_, links_, report_.matrix.rounds, copy_threads_, next_room_},
              cell.cell, cell.waves);
  KVF_TRY_VOID(run.run(result));
  watcher_.done(result);
  report_.cells.push_back(std::move(result));
  return {};
}

Result<void> BenchGroupRun::note_daemons() {
  const std::size_t begin = report_.links.size();
  std::vector<std::array<double, 2>> cpu(links_.size());
  for (std::size_t i = 0; i < links_.size(); ++i) {
    DemoCluster& cluster = links_[i]->cluster();
    LinkUse use{group_, links_[i]->fabric(), carries_[i], {}};
    for (const Side side : {Side::kPrefill, Side::kDecode}) {
      const auto at = static_cast<std::size_t>(side);
      KVF_TRY(use.daemons[at].memory, resident_memory(cluster.daemon_pid(side)));
      KVF_TRY(cpu[i][at], cpu_seconds(cluster.daemon_pid(side)));
    }
    report_.links.push_back(std::move(use));
  }
  if (!options_.idle) {
    return {};
  }
  watcher_.doing(fmt::format("{} {}: idle daemons", group().model, group().layout.name));
  const auto since = std::chrono::steady_clock::now();
  ::poll(nullptr, 0, static_cast<int>(std::chrono::milliseconds(kIdleWindow).count()));
  for (std::size_t i = 0; i < links_.size(); ++i) {
    for (const Side side : {Side::kPrefill, Side::kDecode}) {
      const auto at = static_cast<std::size_t>(side);
      KVF_TRY(const double used, cpu_seconds(links_[i]->cluster().daemon_pid(side)));
      const std::chrono::duration<double> window = std::chrono::steady_clock::now() - since;
      report_.links[begin + i].daemons[at].idle_cpu = (used - cpu[i][at]) / window.count();
    }
  }
  return {};
}

Result<void> BenchGroupRun::stop() {
  for (const auto& link : links_) {
    KVF_TRY_VOID(link->stop());
  }
  links_.clear();
  return {};
}

}  // namespace kvferry
