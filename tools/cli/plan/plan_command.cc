#include "tools/cli/plan/plan_command.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "tools/cli/plan/plan_json.h"
#include "tools/cli/plan/plan_text.h"

namespace kvferry {

PlanOutput run_plan(const PlanOptions& options) {
  const auto report = make_report(options);
  if (!report) {
    return {2, "", fmt::format("kvferry plan: {}\n", report.error().message)};
  }
  return {report->supported() ? 0 : 1,
          options.json ? plan_json(*report).dump(2) + "\n" : plan_text(*report, options.limit), ""};
}

}  // namespace kvferry
