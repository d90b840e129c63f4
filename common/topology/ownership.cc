#include <algorithm>
#include <numeric>

#include "common/base/check.h"
#include "common/topology/topology.h"

namespace kvferry {
namespace {

Interval stage_layers(const Topology& topology, std::uint32_t hidden_layers, std::uint32_t stage) {
  if (!topology.pp_layers.empty()) {
    const auto first = topology.pp_layers.begin();
    const std::uint64_t begin = std::accumulate(first, first + stage, std::uint64_t{0});
    return {begin, begin + topology.pp_layers[stage]};
  }
  const std::uint32_t each = hidden_layers / topology.pp;
  const std::uint32_t rest = hidden_layers % topology.pp;
  const std::uint64_t begin = std::uint64_t{stage} * each + std::min(stage, rest);
  return {begin, begin + each + (stage < rest ? 1 : 0)};
}

}  // namespace

Interval intersect(const Interval& a, const Interval& b) {
  const Interval both{std::max(a.begin, b.begin), std::min(a.end, b.end)};
  return both.end > both.begin ? both : Interval{};
}

std::uint64_t TokenClass::owned_before(std::uint64_t token) const {
  if (count == 1) {
    return token;
  }
  const std::uint64_t period = std::uint64_t{count} * interleave;
  const std::uint64_t own_begin = std::uint64_t{rank} * interleave;
  const std::uint64_t inside = token % period;
  const std::uint64_t partial =
      inside > own_begin ? std::min<std::uint64_t>(inside - own_begin, interleave) : 0;
  return token / period * interleave + partial;
}

bool TokenClass::same_tokens(const TokenClass& other) const {
  return count == other.count && (count == 1 || *this == other);
}

// Both classes are intervals of blocks of gcd(interleaves) tokens, repeated with their periods. Some block x
// of one interval and y of the other, plus whole periods, coincide iff y - x can be a multiple of the gcd of
// the periods; y - x takes every value of a range.
bool TokenClass::meets(const TokenClass& other) const {
  if (count == 1 || other.count == 1) {
    return true;
  }
  const std::int64_t block = std::gcd(interleave, other.interleave);
  const std::int64_t mine = interleave / block;
  const std::int64_t theirs = other.interleave / block;
  const std::int64_t step = std::gcd(mine * count, theirs * other.count);
  const std::int64_t low = rank * mine - (other.rank * theirs + theirs - 1);
  const std::int64_t high = rank * mine + mine - 1 - other.rank * theirs;
  const std::int64_t first_multiple_at_least_low =
      low >= 0 ? (low + step - 1) / step * step : low / step * step;
  return first_multiple_at_least_low <= high;
}

Ownership ownership(const Topology& topology, const ModelGeometry& model, const RankCoord& coord) {
  KVF_CHECK(coord.tp < topology.tp && coord.pp < topology.pp && coord.cp < topology.cp &&
            coord.dp < topology.dp);
  Ownership own;
  own.layers = stage_layers(topology, model.hidden_layers, coord.pp);
  const std::uint32_t ranks = topology.head_ranks();
  const std::uint32_t rank = coord.tp / topology.dcp;
  const std::uint32_t heads = model.attention == AttentionKind::kMla ? 1 : model.kv_heads;
  if (ranks <= heads) {
    KVF_CHECK(heads % ranks == 0);
    const std::uint64_t each = heads / ranks;
    own.heads = {rank * each, (rank + 1) * each};
  } else {
    KVF_CHECK(ranks % heads == 0);
    own.replicas = ranks / heads;
    own.replica = rank % own.replicas;
    const std::uint64_t head = rank / own.replicas;
    own.heads = {head, head + 1};
  }
  own.tokens = {topology.dcp, topology.dcp_rank(coord), topology.dcp == 1 ? 1 : topology.dcp_interleave};
  return own;
}

std::vector<Interval> cp_share(const CpPlace& place, std::uint64_t page_tokens, const Interval& request) {
  KVF_CHECK(place.rank < place.count && page_tokens > 0);
  if (place.count == 1 || place.split == CpSplit::kNone) {
    return place.rank == 0 && request.size() > 0 ? std::vector{request} : std::vector<Interval>{};
  }
  const bool zigzag = place.split == CpSplit::kZigzag;
  const std::uint64_t parts = std::uint64_t{place.count} * (zigzag ? 2 : 1);
  const std::uint64_t pages = (request.size() + page_tokens - 1) / page_tokens;
  const auto edge = [&](std::uint64_t part) {
    const std::uint64_t page = part * (pages / parts) + std::min(part, pages % parts);
    return std::min(request.begin + page * page_tokens, request.end);
  };
  std::vector<Interval> out;
  const auto add = [&](std::uint64_t part) {
    const Interval share{edge(part), edge(part + 1)};
    if (share.size() > 0 && !out.empty() && out.back().end == share.begin) {
      out.back().end = share.end;
    } else if (share.size() > 0) {
      out.push_back(share);
    }
  };
  add(place.rank);
  if (zigzag) {
    add(parts - 1 - place.rank);
  }
  return out;
}

}  // namespace kvferry
