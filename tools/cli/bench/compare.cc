#include "tools/cli/bench/compare.h"

#include <fstream>
#include <map>

#include "tools/cli/bench/report_json.h"

namespace kvferry {
namespace {

using nlohmann::json;

/// By cell and fabric, as a person reads it.
using Ratios = std::map<std::string, double>;

Result<Ratios> ratios_of(const json& run, const char* which) {
  if (!run.is_object() || run.value("schema", 0) != kBenchSchema || !run.contains("cells") ||
      !run["cells"].is_array()) {
    return fail(Code::kInvalid, "the {} is no run of kvferry bench in format {}; store one with --json",
                which, kBenchSchema);
  }
  Ratios ratios;
  for (const json& cell : run["cells"]) {
    if (!cell.is_object() || !cell.contains("fabrics") || !cell["fabrics"].is_array()) {
      continue;  // not run
    }
    for (const json& fabric : cell["fabrics"]) {
      const auto at = json::json_pointer("/to_memcpy/median");
      if (!fabric.is_object() || !fabric.contains(at) || !fabric[at].is_number()) {
        return fail(Code::kInvalid, "the {} has a fabric without to_memcpy.median", which);
      }
      const std::string key = fmt::format(
          "{} {} layers {} tokens {} rooms {}{} {}", cell.value("model", ""), cell.value("layers", 0u),
          cell.value("layout", ""), cell.value("tokens", 0u), cell.value("rooms", 0u),
          cell.value("beside", 0u) > 0 ? fmt::format("+{}", cell.value("beside", 0u)) : "",
          fabric.value("fabric", ""));
      ratios[key] = fabric[at].get<double>();
    }
  }
  return ratios;
}

}  // namespace

Result<Comparison> compare_runs(const json& run, const json& baseline, double tolerance) {
  KVF_TRY(const Ratios now, ratios_of(run, "run"));
  KVF_TRY(const Ratios then, ratios_of(baseline, "baseline"));
  Comparison out;
  for (const auto& [key, before] : then) {
    const auto found = now.find(key);
    if (found == now.end()) {
      out.lines.push_back(fmt::format("  {}: only in the baseline", key));
      continue;
    }
    ++out.compared;
    const bool fell = found->second < before * (1 - tolerance);
    out.fallen += fell ? 1 : 0;
    out.lines.push_back(fmt::format("  {}: {:.2f} x memcpy, baseline {:.2f}{}", key, found->second, before,
                                    fell ? "  FELL" : ""));
  }
  for (const auto& [key, ratio] : now) {
    if (!then.contains(key)) {
      out.lines.push_back(fmt::format("  {}: {:.2f} x memcpy, not in the baseline", key, ratio));
    }
  }
  if (out.compared == 0) {
    return fail(Code::kInvalid, "the run and the baseline have no cell in common; run the same matrix");
  }
  return out;
}

Result<json> load_run(const std::string& path) {
  std::ifstream file(path);
  if (!file) {
    return fail(Code::kNotFound, "{} cannot be read", path);
  }
  json run = json::parse(file, nullptr, false);
  if (const auto ratios = ratios_of(run, "baseline"); !ratios) {
    return fail(Code::kInvalid, "{}: {}", path, ratios.error().message);
  }
  return run;
}

}  // namespace kvferry
