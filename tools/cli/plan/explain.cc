#include "tools/cli/plan/explain.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "common/topology/rank_map.h"
#include "tools/cli/plan/pair_plan.h"

namespace kvferry {
namespace {

Ownership owned_by(const PlanRequest& request, const PlannedSide& side, RankIndex rank) {
  return ownership(side.topology, request.model, side.topology.coord(rank));
}

std::vector<RankIndex> owners(const PlanRequest& request, const PlannedSide& side, std::uint64_t token) {
  std::vector<RankIndex> out;
  for (RankIndex rank = side.first_rank(); rank < side.first_rank() + side.rank_count(); ++rank) {
    if (owned_by(request, side, rank).tokens.owns(token)) {
      out.push_back(rank);
    }
  }
  return out;
}

TokenPlace place_of(const PlannedSide& side, std::uint64_t row) {
  TokenPlace place{0, row / side.page_size, row % side.page_size, row};
  const auto at = std::lower_bound(side.pages.begin(), side.pages.end(), place.page);  // lists ascend
  place.page_index = static_cast<std::uint64_t>(at - side.pages.begin());
  return place;
}

using Holders = std::set<TokenHolder>;
using ElectionKey = std::tuple<RankIndex, Interval, Interval>;  // decode rank, layers, heads

/// What the two ranks of one pair share.
struct Meeting {
  RankIndex prefill = 0;
  RankIndex decode = 0;
  Interval layers;
  Interval heads;
};

void note_holders(const PlanRequest& request, const Meeting& meeting, const Plan& plan, Holders& prefill,
                  Holders& decode) {
  TokenHolder from{meeting.prefill,
                   meeting.layers,
                   meeting.heads,
                   place_of(request.prefill, plan.runs.front().src_row),
                   {}};
  TokenHolder into{
      meeting.decode, meeting.layers, meeting.heads, place_of(request.decode, plan.runs.front().dst_row), {}};
  const std::vector<BufferShape> buffers = planned_buffers(request.model, request.prefill, meeting.prefill);
  for (const BufferPair& pair : plan.pairs) {
    const BufferKind kind = buffers[pair.src_buffer].kind;
    // Layers of one kind are alike.
    if (from.parts.empty() || from.parts.back().kind != kind) {
      from.parts.push_back({kind, pair.src_offset, pair.bytes, pair.src_row_bytes});
      into.parts.push_back({kind, pair.dst_offset, pair.bytes, pair.dst_row_bytes});
    }
  }
  prefill.insert(std::move(from));
  decode.insert(std::move(into));
}

}  // namespace

Result<Explanation> explain(const PlanRequest& request, std::uint64_t token) {
  Explanation out;
  out.token = token;
  out.moves = token >= request.prefix;
  out.prefill_owners = owners(request, request.prefill, token);
  out.decode_owners = owners(request, request.decode, token);
  if (!out.moves) {
    return out;
  }
  Holders prefill;
  Holders decode;
  std::map<ElectionKey, TokenElection> elections;
  for (const RankIndex dst : out.decode_owners) {
    const Ownership into = owned_by(request, request.decode, dst);
    for (const RankIndex src : out.prefill_owners) {
      const Ownership from = owned_by(request, request.prefill, src);
      const RankPairing pairing =
          rank_pairing(request.model, request.prefill.topology, request.prefill.topology.coord(src),
                       request.decode.topology, request.decode.topology.coord(dst));
      if (!pairing.target) {
        continue;
      }
      KVF_TRY(const std::vector<PartPlan> parts, plan_pair(request, src, dst, {token, token + 1}));
      if (parts.empty() || parts.front().space != RowSpace::kTokens) {
        continue;  // another CP rank's share, or a layer that keeps no row of this token
      }
      const Plan& plan = parts.front().plan;
      const Meeting meeting{src, dst, intersect(from.layers, into.layers), intersect(from.heads, into.heads)};
      note_holders(request, meeting, plan, prefill, decode);
      TokenElection& election = elections[{dst, meeting.layers, meeting.heads}];
      election.decode = dst;
      election.layers = meeting.layers;
      election.heads = meeting.heads;
      election.candidates.push_back(src);
      if (pairing.sends(request.room)) {
        election.prefill = src;
      }
    }
  }
  out.prefill.assign(prefill.begin(), prefill.end());
  out.decode.assign(decode.begin(), decode.end());
  for (auto& [key, election] : elections) {
    out.elections.push_back(std::move(election));
  }
  return out;
}

}  // namespace kvferry
