#include "tools/cli/plan/pair_plan.h"

namespace kvferry {
namespace {

RankShape rank_shape_of(const ModelGeometry& model, const PlannedSide& side, RankIndex rank) {
  return {side.topology, side.topology.coord(rank), side.page_size, planned_buffers(model, side, rank)};
}

RequestRows rows_of(const PlannedSide& side) {
  return {side.pages, side.first_token, side.window_pages, side.window_first, 0};
}

}  // namespace

std::vector<BufferShape> planned_buffers(const ModelGeometry& model, const PlannedSide& side,
                                         RankIndex rank) {
  return rank_buffers(model, side.topology, side.topology.coord(rank), side.pool_pages(),
                      rows_of_page(RowSpace::kDraft, side.page_size, side.topology));
}

Result<std::vector<PartPlan>> plan_pair(const PlanRequest& request, RankIndex prefill, RankIndex decode,
                                        const Interval& tokens) {
  KVF_TRY(const std::vector<PairLayout> layouts,
          pair_layouts(request.model, rank_shape_of(request.model, request.prefill, prefill),
                       rank_shape_of(request.model, request.decode, decode)));
  PartRequest part;
  part.tokens = tokens;
  part.request = {request.prefix, request.tokens};
  part.window = request.model.sliding_window;
  part.last = tokens.end == request.tokens;
  part.src = rows_of(request.prefill);
  part.dst = rows_of(request.decode);
  std::vector<PartPlan> parts;
  for (const PairLayout& layout : layouts) {
    KVF_TRY(Plan plan, plan_part(layout, part));
    if (plan.rows > 0) {
      parts.push_back({layout.space, std::move(plan), layout.elected(request.room)});
    }
  }
  return parts;
}

}  // namespace kvferry
