#pragma once
// The one place that asks the planner: everything `kvferry plan` says about rows and bytes comes from here.

#include <vector>

#include "common/plan/plan.h"
#include "tools/cli/plan/plan_request.h"

namespace kvferry {

/// One part of what a pair of ranks exchanges.
struct PartPlan {
  RowSpace space = RowSpace::kTokens;
  Plan plan;
  bool elected = true;  // this source sends it for the request's room
};

/// What prefill rank `prefill` holds of `tokens` for decode rank `decode`, part by part, whether it is the
/// elected source or not; windows and state only where the tokens are the request's last. Tokens lie in
/// [prefix, tokens) of the request; the layouts must have passed check_request(). Parts without rows are left
/// out. Errors are the planner's.
Result<std::vector<PartPlan>> plan_pair(const PlanRequest& request, RankIndex prefill, RankIndex decode,
                                        const Interval& tokens);

/// The buffers of every rank's pool as they are assumed here.
std::vector<BufferShape> planned_buffers(const ModelGeometry& model, const PlannedSide& side, RankIndex rank);

}  // namespace kvferry
