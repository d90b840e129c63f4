#include "common/topology/rank_map.h"

#include <algorithm>

#include "common/base/check.h"

namespace kvferry {
namespace {

/// Tokens of one prefill DCP rank are held by tp/dcp ranks, which look like a TP group of that size: position
/// `rank` of `size`, with `replicas` neighbours per head. Without prefill DCP it is the whole TP group.
struct ClassGroup {
  std::uint32_t size = 1;
  std::uint32_t rank = 0;
  std::uint32_t replicas = 1;
};

ClassGroup class_group(const Topology& prefill, const RankCoord& coord, const Ownership& own) {
  return {prefill.tp / prefill.dcp, coord.tp / prefill.dcp, own.head_replicas / prefill.dcp};
}

}  // namespace

std::uint32_t elected_replica(Room room, std::uint32_t replicas) {
  if (replicas <= 1) {
    return 0;
  }
  std::uint64_t mixed = room + 0x9E3779B97F4A7C15ull;
  mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9ull;
  mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBull;
  return static_cast<std::uint32_t>((mixed ^ (mixed >> 31)) % replicas);
}

RankPairing rank_pairing(const ModelGeometry& model, const Topology& prefill, const RankCoord& prefill_coord,
                         const Topology& decode, const RankCoord& decode_coord) {
  const Ownership src = ownership(prefill, model, prefill_coord);
  const Ownership dst = ownership(decode, model, decode_coord);
  if (prefill_coord.cp != 0 || intersect(src.layers, dst.layers).size() == 0 ||
      !src.tokens.meets(dst.tokens)) {
    return {};
  }
  const ClassGroup group = class_group(prefill, prefill_coord, src);
  RankPairing pairing;
  if (group.size <= decode.tp) {
    pairing.target = group.rank == decode_coord.tp / (decode.tp / group.size);
    return pairing;
  }
  const std::uint32_t per_destination = group.size / decode.tp;
  pairing.target = group.rank / per_destination == decode_coord.tp;
  pairing.replicas = std::min(group.replicas, per_destination);
  pairing.replica = group.rank % pairing.replicas;
  return pairing;
}

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
  if (problems.empty()) {
    const auto multiples = [](std::uint32_t a, std::uint32_t b) {
      return std::max(a, b) % std::min(a, b) == 0;
    };
    if (!multiples(prefill.tp, decode.tp)) {
      add(fmt::format(
          "attention TP {} (prefill) and {} (decode) are not multiples of each other; use powers of "
          "two",
          prefill.tp, decode.tp));
    } else if (!multiples(prefill.tp / prefill.dcp, decode.tp)) {
      add(fmt::format(
          "prefill tp/dcp {}/{} and decode tp {} are not multiples of each other; use powers of two",
          prefill.tp, prefill.dcp, decode.tp));
    }
    if (decode.cp != 1) {
      add(fmt::format("decode cp is {}, decode needs attention CP=1", decode.cp));
    }
    if (prefill.cp != 1 && (prefill.dcp != 1 || decode.dcp != 1)) {
      add(fmt::format(
          "prefill cp is {} with dcp {} (prefill) and {} (decode); DCP needs prefill attention CP=1",
          prefill.cp, prefill.dcp, decode.dcp));
    }
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
  for (RankCoord src{0, 0, 0, prefill_dp}; src.pp < prefill.pp; ++src.pp) {
    for (src.tp = 0; src.tp < prefill.tp; ++src.tp) {
      const RankPairing pairing = rank_pairing(model, prefill, src, decode, dst);
      if (!pairing.target) {
        continue;
      }
      const RankIndex index = prefill.rank_index(src);
      out.targets.push_back(index);
      if (pairing.sends(room)) {
        if (out.sources.empty() || src.pp > last_stage) {
          out.aux_source = index;
          last_stage = src.pp;
        }
        out.sources.push_back(index);
      }
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
  for (RankCoord dst{0, 0, 0, decode_dp}; dst.pp < decode.pp; ++dst.pp) {
    for (dst.tp = 0; dst.tp < decode.tp; ++dst.tp) {
      if (rank_pairing(model, prefill, src, decode, dst).target) {
        out.push_back(decode.rank_index(dst));
      }
    }
  }
  return out;
}

}  // namespace kvferry
