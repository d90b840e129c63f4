#pragma once
// The one place that asks the planner: everything `kvferry plan` says about rows and bytes comes from here.

#include "common/plan/plan.h"
#include "tools/cli/plan/plan_request.h"

namespace kvferry {

/// What prefill rank `prefill` holds of `tokens` for decode rank `decode`, whether it is the elected source
/// or not. Tokens lie in [prefix, tokens) of the request; the layouts must have passed check_request().
/// Errors are the planner's.
Result<Plan> plan_pair(const PlanRequest& request, RankIndex prefill, RankIndex decode,
                       const Interval& tokens);

}  // namespace kvferry
