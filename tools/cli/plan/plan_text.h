#pragma once
// The report for people: at most 110 columns for figures of up to ten digits.

#include <string>

#include "tools/cli/plan/plan_report.h"

namespace kvferry {

/// `limit` lines of each list, 0 = all. A list that is cut says so.
std::string plan_text(const PlanReport& report, std::uint64_t limit);

}  // namespace kvferry
