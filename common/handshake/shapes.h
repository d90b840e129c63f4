#pragma once
// From what a daemon says about a rank to what the planner works with.

#include "common/handshake/descriptor.h"
#include "common/plan/plan.h"

namespace kvferry {

/// The planner's view of one local rank of `side`. Only for Descriptors that passed the rules: rows are
/// whole.
RankShape rank_shape(const Descriptor& side, const RankDescription& rank);

}  // namespace kvferry
