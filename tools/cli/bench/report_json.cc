#include "tools/cli/bench/report_json.h"

namespace kvferry {
namespace {

using nlohmann::json;

json spread_json(const Spread& spread) {
  return {{"median", spread.median}, {"min", spread.min}, {"max", spread.max}};
}

json fabric_json(const FabricResult& fabric) {
  json out{{"fabric", fabric.fabric},
           {"rate", spread_json(fabric.rate)},
           {"to_memcpy", spread_json(fabric.to_memcpy)},
           {"to_copy", spread_json(fabric.to_kernel)},
           {"to_copy_parallel", spread_json(fabric.to_kernels)},
           {"cpu_s_per_gb", {{"prefill", fabric.cpu_per_gb[0]}, {"decode", fabric.cpu_per_gb[1]}}},
           {"send_call_s", fabric.call_p50},
           {"writes_per_room", fabric.writes_per_room},
           {"latency_s",
            {{"p50", fabric.p50}, {"p99", fabric.p99}, {"p99.9", fabric.p999}, {"rooms", fabric.rooms}}},
           {"verified_bytes", fabric.verified}};
  if (fabric.p99_alone) {
    out["latency_s"]["p99_alone"] = *fabric.p99_alone;
  }
  return out;
}

json cell_json(const BenchMatrix& matrix, const CellResult& cell) {
  const BenchGroup& group = matrix.groups[cell.group];
  json out{{"model", group.model},       {"layers", group.layers},   {"layout", group.layout.name},
           {"tokens", cell.cell.tokens}, {"rooms", cell.cell.rooms}, {"beside", cell.cell.beside}};
  if (!cell.not_run.empty()) {
    out["not_run"] = cell.not_run;
    return out;
  }
  out["waves"] = cell.waves;
  out["round_bytes"] = cell.round_bytes;
  out["pieces"] = cell.pieces;
  out["memcpy"] = spread_json(cell.memcpy);
  out["copy"] = spread_json(cell.kernel);
  out["copy_parallel"] = spread_json(cell.kernels);
  out["copy_threads"] = cell.copy_threads;
  out["copy_to_memcpy"] = spread_json(cell.kernel_to_memcpy);
  out["fabrics"] = json::array();
  for (const FabricResult& fabric : cell.fabrics) {
    out["fabrics"].push_back(fabric_json(fabric));
  }
  return out;
}

}  // namespace

json report_json(const BenchReport& report) {
  const MachineInfo& machine = report.machine;
  json out{{"schema", kBenchSchema},
           {"machine",
            {{"cpu", machine.cpu},
             {"cores", machine.cores},
             {"l3_bytes", machine.l3_bytes},
             {"memory_bytes", machine.memory},
             {"kernel", machine.kernel},
             {"load", machine.load}}},
           {"version", machine.version},
           {"copy_kernel", machine.copy_variant},
           {"matrix",
            {{"name", report.matrix.name},
             {"fabrics", report.matrix.fabrics},
             {"rounds", report.matrix.rounds},
             {"page_size", report.page_size},
             {"verify", report.verify},
             {"left_out", report.matrix.left_out}}},
           {"seconds", report.seconds},
           {"cores_of_others", report.cores_of_others},
           {"problems", report.problems},
           {"cells", json::array()},
           {"daemons", json::array()}};
  for (const CellResult& cell : report.cells) {
    out["cells"].push_back(cell_json(report.matrix, cell));
  }
  for (const LinkUse& link : report.links) {
    for (const Side side : {Side::kPrefill, Side::kDecode}) {
      const DaemonUse& daemon = link.daemons[static_cast<std::size_t>(side)];
      json use{{"model", report.matrix.groups[link.group].model},
               {"layout", report.matrix.groups[link.group].layout.name},
               {"fabric", link.fabric},
               {"carries", link.carries},
               {"side", side_name(side)},
               {"own_bytes", daemon.memory.own},
               {"shared_bytes", daemon.memory.shared}};
      if (daemon.idle_cpu) {
        use["idle_cpu"] = *daemon.idle_cpu;
      }
      out["daemons"].push_back(std::move(use));
    }
  }
  return out;
}

}  // namespace kvferry
