#pragma once
// `kvferry plan`: what a request between two layouts would move, without a daemon, an engine or a pool.

#include <string>

#include "tools/cli/plan/plan_options.h"

namespace kvferry {

struct PlanOutput {
  int exit_status = 0;  // 0: supported, 1: not supported, 2: wrong usage
  std::string text;     // for standard output
  std::string error;    // for standard error
};

PlanOutput run_plan(const PlanOptions& options);

}  // namespace kvferry
