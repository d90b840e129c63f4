#include "common/topology/rank_map.h"

#include <algorithm>

#include "common/base/check.h"

namespace kvferry {
std::uint32_t elected_replica(Room room, std::uint32_t replicas) {
  if (replicas <= 1) {
    return 0;
  }
  std::uint64_t mixed = room + 0x9E3779B97F4A7C15ull;
  mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9ull;
  mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBull;
  return static_cast<std::uint32_t>((mixed ^ (mixed >> 31)) % replicas);
}

namespace {

/// Deals `replicas` sources out over `holders` destinations.
RankPairing deal(std::uint64_t replica, std::uint64_t replicas, std::uint64_t holder, std::uint64_t holders) {
  const std::uint64_t first = holder * replicas / holders;
  const std::uint64_t end = std::max(first + 1, (holder + 1) * replicas / holders);
  RankPairing pairing;
  pairing.target = replica >= first && replica < end;
  pairing.replica = static_cast<std::uint32_t>(replica - first);
  pairing.replicas = static_cast<std::uint32_t>(end - first);
  return pairing;
}

/// A target that is never elected: it holds the request and sends nothing of it, but finishes with it.
RankPairing dummy(RankPairing pairing) {
  pairing.replica = pairing.replicas;
  return pairing;
}

/// Recurrent state is sharded over all TP ranks, whatever the heads do.
RankPairing pair_state(const ModelGeometry& model, const Topology& prefill, const RankCoord& src,
                       const Topology& decode, const RankCoord& dst, const Interval& layers) {
  const auto first = std::lower_bound(model.state_layers.begin(), model.state_layers.end(), layers.begin);
  const bool has_layer = first != model.state_layers.end() && *first < layers.end;
  const Interval mine{std::uint64_t{src.tp} * decode.tp, (std::uint64_t{src.tp} + 1) * decode.tp};
  const Interval theirs{std::uint64_t{dst.tp} * prefill.tp, (std::uint64_t{dst.tp} + 1) * prefill.tp};
  RankPairing pairing;
  pairing.target = src.cp == 0 && has_layer && intersect(mine, theirs).size() > 0;
  return pairing;
}

}  // namespace

std::vector<RowSpace> pairing_spaces(const ModelGeometry& model) {
  std::vector<RowSpace> out{RowSpace::kTokens};
  if (model.draft_layers > 0) {
    out.push_back(RowSpace::kDraft);
  }
  if (!model.state_layers.empty()) {
    out.push_back(RowSpace::kState);
  }
  return out;
}

RankPairing rank_pairing(const ModelGeometry& model, const Topology& prefill, const RankCoord& prefill_coord,
                         const Topology& decode, const RankCoord& decode_coord, RowSpace space) {
  const Ownership src = ownership(prefill, model, prefill_coord);
  const Ownership dst = ownership(decode, model, decode_coord);
  const Interval layers = intersect(src.layers, dst.layers);
  if (space == RowSpace::kState) {
    return pair_state(model, prefill, prefill_coord, decode, decode_coord, layers);
  }
  if (prefill_coord.cp != 0 && prefill.cp_split == CpSplit::kNone) {
    RankCoord sender = prefill_coord;
    sender.cp = 0;
    return dummy(rank_pairing(model, prefill, sender, decode, decode_coord, space));
  }
  if (intersect(src.heads, dst.heads).size() == 0) {
    return {};
  }
  if (space == RowSpace::kDraft) {
    if (!src.last_stage || !dst.last_stage) {
      return {};
    }
    // Every DCP rank holds all of it, on both sides.
    const std::uint64_t replicas = std::uint64_t{src.replicas} * prefill.dcp;
    const std::uint64_t holders = std::uint64_t{dst.replicas} * decode.dcp;
    return deal(prefill_coord.tp % replicas, replicas, decode_coord.cp * holders + decode_coord.tp % holders,
                holders * decode.cp);
  }
  if (layers.size() == 0 || !src.tokens.meets(dst.tokens)) {
    return {};
  }
  // The decode ranks that need something of this source, in an order: stages change fastest, then DCP ranks.
  const std::uint32_t first_stage = stage_of(decode, model.hidden_layers, src.layers.begin);
  const std::uint64_t stages = stage_of(decode, model.hidden_layers, src.layers.end - 1) - first_stage + 1;
  const std::uint64_t dcp_ranks = src.tokens.met_before(dst.tokens, dst.tokens.count);
  const std::uint64_t needing = decode.cp * dst.replicas * dcp_ranks * stages;
  std::uint64_t place = std::uint64_t{decode_coord.cp} * dst.replicas + dst.replica;
  place = place * dcp_ranks + src.tokens.met_before(dst.tokens, dst.tokens.rank);
  place = place * stages + (decode_coord.pp - first_stage);
  return deal(src.replica, src.replicas, place, needing);
}

namespace {

/// Whether the two ranks meet over anything at all, and whether the source sends any of it for `room`.
struct Meeting {
  bool target = false;
  bool sends = false;
};

Meeting meeting(const ModelGeometry& model, const std::vector<RowSpace>& spaces, const Topology& prefill,
                const RankCoord& src, const Topology& decode, const RankCoord& dst, Room room) {
  Meeting out;
  for (const RowSpace space : spaces) {
    const RankPairing pairing = rank_pairing(model, prefill, src, decode, dst, space);
    out.target = out.target || pairing.target;
    out.sends = out.sends || pairing.sends(room);
  }
  return out;
}

}  // namespace

Result<void> validate_pair(const ModelGeometry& model, const Topology& prefill, const Topology& decode) {
  std::string problems;
  const auto add = [&problems](std::string problem) {
    problems += problems.empty() ? "" : "; ";
    problems += problem;
  };
  for (const auto& [side, topology] : {std::pair{"prefill", &prefill}, std::pair{"decode", &decode}}) {
    if (const auto valid = validate(*topology, model); !valid) {
      add(fmt::format("{} {}", side, valid.error().message));
    }
  }
  if (decode.cp != 1 && decode.cp_split != CpSplit::kNone) {
    add(fmt::format(
        "decode cp_split is {} over {} CP ranks: which of them holds a token that decode generates "
        "is not defined; set it to none",
        to_string(decode.cp_split), decode.cp));
  }
  if (!problems.empty()) {
    return fail(Code::kMismatch, "{}", problems);
  }
  return {};
}

DecodeTargets decode_targets(const ModelGeometry& model, const Topology& prefill, const Topology& decode,
                             RankIndex decode_rank, std::uint32_t prefill_dp, Room room) {
  KVF_CHECK(decode_rank < decode.rank_count() && prefill_dp < prefill.dp);
  const RankCoord dst = decode.coord(decode_rank);
  DecodeTargets out;
  std::uint32_t last_stage = 0;
  const std::vector<RowSpace> spaces = pairing_spaces(model);
  const RankIndex ranks = prefill.rank_count() / prefill.dp;
  for (RankIndex index = prefill_dp * ranks; index < (prefill_dp + 1) * ranks; ++index) {
    const RankCoord src = prefill.coord(index);
    const Meeting met = meeting(model, spaces, prefill, src, decode, dst, room);
    if (!met.target) {
      continue;
    }
    out.targets.push_back(index);
    if (met.sends) {
      if (out.sources.empty() || src.pp > last_stage) {
        out.aux_source = index;
        last_stage = src.pp;
      }
      out.sources.push_back(index);
    }
  }
  KVF_CHECK(!out.sources.empty());
  out.required_dst_info_num =
      static_cast<std::uint32_t>(prefill_destinations(model, prefill, decode, out.aux_source, dst.dp).size());
  out.required_prefill_response_num = static_cast<std::uint32_t>(out.sources.size());
  return out;
}

std::vector<RankIndex> prefill_destinations(const ModelGeometry& model, const Topology& prefill,
                                            const Topology& decode, RankIndex prefill_rank,
                                            std::uint32_t decode_dp) {
  KVF_CHECK(prefill_rank < prefill.rank_count() && decode_dp < decode.dp);
  const RankCoord src = prefill.coord(prefill_rank);
  std::vector<RankIndex> out;
  const std::vector<RowSpace> spaces = pairing_spaces(model);
  const RankIndex ranks = decode.rank_count() / decode.dp;
  for (RankIndex index = decode_dp * ranks; index < (decode_dp + 1) * ranks; ++index) {
    if (meeting(model, spaces, prefill, src, decode, decode.coord(index), 1).target) {
      out.push_back(index);
    }
  }
  return out;
}

}  // namespace kvferry
