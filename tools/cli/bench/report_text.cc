#include "tools/cli/bench/report_text.h"

#include <fmt/ranges.h>

#include "tools/cli/demo/demo_results.h"

namespace kvferry {
namespace {

constexpr double kMiB = 1u << 20;
constexpr double kGiB = 1u << 30;

std::string numbers(const Spread& spread, double unit) {
  return fmt::format("{:.2f} ({:.2f}-{:.2f})", spread.median / unit, spread.min / unit, spread.max / unit);
}

std::string copy_row(const std::string& name, const Spread& rate, const Spread* ratio) {
  return fmt::format("{:>16} {:<10} {:<19} {}\n", "", name, numbers(rate, 1e9),
                     ratio == nullptr ? "1" : numbers(*ratio, 1));
}

std::string fabric_row(const FabricResult& fabric) {
  return fmt::format(
      "{:>16} {:<10} {:<19} {:<19} {:>6.2f} {:>9.3f} {:>9.3f} {:>9.3f} {:>6.3f} {:>6.3f} {:>9.1f}\n", "",
      fabric.fabric, numbers(fabric.rate, 1e9), numbers(fabric.to_memcpy, 1), fabric.to_kernels.median,
      fabric.p50 * 1e3, fabric.p99 * 1e3, fabric.p999 * 1e3, fabric.cpu_per_gb[0], fabric.cpu_per_gb[1],
      fabric.writes_per_room);
}

}  // namespace

std::string report_head(const BenchReport& report) {
  const MachineInfo& machine = report.machine;
  std::string text = fmt::format(
      "machine   {}, {} cores, L3 {:.0f} MiB as reported, {:.0f} GiB memory; {}; load {:.2f} {:.2f} {:.2f}\n"
      "version   kvferry {}, copy kernel {}\n",
      machine.cpu, machine.cores, static_cast<double>(machine.l3_bytes) / kMiB,
      static_cast<double>(machine.memory) / kGiB, machine.kernel, machine.load[0], machine.load[1],
      machine.load[2], machine.version, machine.copy_variant);
  text += fmt::format(
      "matrix    {}: fabrics {} in turns, each between two memcpys; {} round{} and a discarded one; median "
      "(min-max); "
      "page size {}; digests by the daemons (verify): {}\n",
      report.matrix.name, fmt::join(report.matrix.fabrics, ", "), report.matrix.rounds,
      report.matrix.rounds == 1 ? "" : "s", report.page_size, report.verify);
  text +=
      "measured  from the moment that pages are ready (the fence of kvf_send), when both daemons know of the "
      "room,\n          to the landing at the decode engine, which is the same process; after each turn "
      "every "
      "byte of the\n          destination pages is compared; x memcpy: of the same rows by one thread, right "
      "before and after\n";
  for (const std::string& line : report.matrix.left_out) {
    text += fmt::format("not run   {}\n", line);
  }
  return text;
}

std::string group_head(const BenchGroup& group) {
  std::string text = fmt::format("\n{}, {} of {} layers, {} bytes a token; {}: prefill {} to decode {}\n",
                                 group.model, group.layers, group.layers_of_model, group.token_bytes,
                                 group.layout.name, group.layout.prefill, group.layout.decode);
  text += fmt::format("{:>8} {:>7} {:<10} {:<19} {:<19} {:>6} {:>9} {:>9} {:>9} {:>6} {:>6} {:>9}\n",
                      "tokens", "rooms", "", "GB/s", "x memcpy", "x copy", "p50 ms", "p99 ms", "p99.9 ms",
                      "P s/GB", "D s/GB", "writes");
  return text;
}

std::string cell_rows(const BenchReport& report, const CellResult& cell) {
  const std::string rooms =
      cell.cell.beside > 0 ? fmt::format("{}+1", cell.cell.rooms) : fmt::format("{}", cell.cell.rooms);
  if (!cell.not_run.empty()) {
    return fmt::format("{:>8} {:>7} not run: {}\n", cell.cell.tokens, rooms, cell.not_run);
  }
  // Source and destination of a round, which every turn goes through again.
  const bool cached = 2 * cell.round_bytes < report.machine.l3_bytes;
  std::string text =
      fmt::format("{:>8} {:>7} {} a round in {} wave{}, {} pieces{}\n", cell.cell.tokens, rooms,
                  format_bytes(cell.round_bytes), cell.waves, cell.waves == 1 ? "" : "s", cell.pieces,
                  cached ? "; may lie in the L3" : "");
  text += copy_row("memcpy", cell.memcpy, nullptr);
  text += copy_row("copy x1", cell.kernel, &cell.kernel_to_memcpy);
  if (cell.copy_threads > 1) {
    text += copy_row(fmt::format("copy x{}", cell.copy_threads), cell.kernels, &cell.kernels_to_memcpy);
  }
  for (const FabricResult& fabric : cell.fabrics) {
    text += fabric_row(fabric);
  }
  for (const FabricResult& fabric : cell.fabrics) {
    if (fabric.p99_alone) {
      text += fmt::format(
          "{:>16} {:<10} p99 of the {} small rooms: {:.3f} ms alone, {:.3f} ms beside one of {} "
          "tokens: x {:.2f}\n",
          "", fabric.fabric, cell.cell.rooms, *fabric.p99_alone * 1e3, fabric.p99 * 1e3, cell.cell.beside,
          *fabric.p99_alone > 0 ? fabric.p99 / *fabric.p99_alone : 0);
    }
  }
  return text;
}

std::string busy_warning(const BenchReport& report) {
  constexpr double kLittle = 0.1;
  if (report.cores_of_others < kLittle) {
    return {};
  }
  return fmt::format(
      "\nother processes used {:.1f} of {} cores meanwhile: ratios are those of a busy machine, too high "
      "where a room "
      "waits more\nthan it copies and too low where two processes copy at once; repeat before you rely on "
      "them\n",
      report.cores_of_others, report.machine.cores);
}

std::string link_rows(const BenchReport& report) {
  std::string text =
      "\ndaemons at the end of their group: memory of their own (shared with engines), MiB, of prefill and "
      "decode\n";
  for (const LinkUse& link : report.links) {
    const BenchGroup& group = report.matrix.groups[link.group];
    const auto memory = [&](Side side) {
      const ResidentMemory& of = link.daemons[static_cast<std::size_t>(side)].memory;
      return fmt::format("{:.1f} ({:.0f})", static_cast<double>(of.own) / kMiB,
                         static_cast<double>(of.shared) / kMiB);
    };
    const auto& idle = link.daemons[0].idle_cpu;
    text += fmt::format("  {:<28} {:<8} {:<12} {:<12} carried by {}{}\n",
                        fmt::format("{} {}", group.model, group.layout.name), link.fabric,
                        memory(Side::kPrefill), memory(Side::kDecode), link.carries,
                        idle ? fmt::format("; idle {:.2f} and {:.2f} % of a core", *idle * 100,
                                           link.daemons[1].idle_cpu.value_or(0) * 100)
                             : "");
  }
  return text;
}

}  // namespace kvferry
