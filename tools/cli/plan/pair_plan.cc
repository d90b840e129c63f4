#include "tools/cli/plan/pair_plan.h"

namespace kvferry {
namespace {

RankShape rank_shape_of(const ModelGeometry& model, const PlannedSide& side, RankIndex rank) {
  const RankCoord coord = side.topology.coord(rank);
  return {side.topology, coord, side.page_size, rank_buffers(model, side.topology, coord, side.pool_pages())};
}

}  // namespace

Result<Plan> plan_pair(const PlanRequest& request, RankIndex prefill, RankIndex decode,
                       const Interval& tokens) {
  KVF_TRY(const PairLayout layout,
          pair_layout(request.model, rank_shape_of(request.model, request.prefill, prefill),
                      rank_shape_of(request.model, request.decode, decode)));
  return plan_chunk(layout, ChunkRequest{tokens.begin,
                                         tokens.end,
                                         request.prefill.first_token,
                                         request.decode.first_token,
                                         request.prefill.pages,
                                         request.decode.pages,
                                         {request.prefix, request.tokens}});
}

}  // namespace kvferry
