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

// Tokens, counted in blocks of gcd(interleaves), belong to class a iff they are one of `width` neighbouring
// residues modulo its period, and likewise to b. By the Chinese remainder theorem some token belongs to both
// iff a residue of the one equals one of the other modulo the gcd of the periods: iff the two ranges overlap
// on a circle of that size. Seen from a, b's range then ends in one of `window` places. Ranks of b's group
// lie `step` apart.
struct Overlap {
  std::int64_t circle;
  std::int64_t window;
  std::int64_t step;
  std::int64_t offset;

  Overlap(const TokenClass& a, const TokenClass& b) {
    const std::int64_t block = std::gcd(a.interleave, b.interleave);
    const std::int64_t width = a.interleave / block;
    step = b.interleave / block;
    circle = std::gcd(width * a.count, step * b.count);
    window = std::min(width + step - 1, circle);
    const std::int64_t end = (step - 1 - a.rank * width) % circle;
    offset = end < 0 ? end + circle : end;
  }
};

/// The sum of floor((step * i + offset) / divisor) over i in [0, count), by the steps of Euclid's algorithm.
std::int64_t floor_sum(std::int64_t count, std::int64_t divisor, std::int64_t step, std::int64_t offset) {
  std::int64_t sum = 0;
  while (true) {
    sum += count * (count - 1) / 2 * (step / divisor) + count * (offset / divisor);
    step %= divisor;
    offset %= divisor;
    const std::int64_t end = step * count + offset;
    if (end < divisor) {
      return sum;
    }
    count = end / divisor;
    offset = end % divisor;
    std::swap(divisor, step);
  }
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

bool TokenClass::meets(const TokenClass& other) const {
  const Overlap overlap(*this, other);
  return (overlap.step * other.rank + overlap.offset) % overlap.circle < overlap.window;
}

std::uint32_t TokenClass::met_before(const TokenClass& other, std::uint32_t end) const {
  const Overlap overlap(*this, other);
  if (overlap.window == overlap.circle) {
    return end;
  }
  // floor(x/c) - floor((x-w)/c) is 1 where x mod c < w, else 0; a whole circle more keeps all terms positive.
  const std::int64_t above = overlap.offset + overlap.circle;
  return static_cast<std::uint32_t>(floor_sum(end, overlap.circle, overlap.step, above) -
                                    floor_sum(end, overlap.circle, overlap.step, above - overlap.window));
}

Ownership ownership(const Topology& topology, const ModelGeometry& model, const RankCoord& coord) {
  KVF_CHECK(coord.tp < topology.tp && coord.pp < topology.pp && coord.cp < topology.cp &&
            coord.dp < topology.dp);
  Ownership own;
  own.layers = stage_layers(topology, model.hidden_layers, coord.pp);
  own.last_stage = coord.pp + 1 == topology.pp;
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

std::uint32_t stage_of(const Topology& topology, std::uint32_t hidden_layers, std::uint64_t layer) {
  KVF_CHECK(layer < hidden_layers);
  if (topology.pp_layers.empty()) {
    const std::uint32_t each = hidden_layers / topology.pp;
    const std::uint32_t rest = hidden_layers % topology.pp;
    const std::uint64_t in_larger = std::uint64_t{rest} * (each + 1);
    return static_cast<std::uint32_t>(layer < in_larger ? layer / (each + 1)
                                                        : rest + (layer - in_larger) / each);
  }
  std::uint32_t stage = 0;
  for (std::uint64_t end = topology.pp_layers[0]; layer >= end; end += topology.pp_layers[stage]) {
    ++stage;
  }
  return stage;
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
