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

RankPairing rank_pairing(const ModelGeometry& model, const Topology& prefill, const RankCoord& prefill_coord,
                         const Topology& decode, const RankCoord& decode_coord) {
  const Ownership src = ownership(prefill, model, prefill_coord);
  const Ownership dst = ownership(decode, model, decode_coord);
  if ((prefill_coord.cp != 0 && prefill.cp_split == CpSplit::kNone) ||
      intersect(src.layers, dst.layers).size() == 0 || intersect(src.heads, dst.heads).size() == 0 ||
      !src.tokens.meets(dst.tokens)) {
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
  const std::uint64_t first = place * src.replicas / needing;
  const std::uint64_t end = std::max(first + 1, (place + 1) * src.replicas / needing);
  RankPairing pairing;
  pairing.target = src.replica >= first && src.replica < end;
  pairing.replica = static_cast<std::uint32_t>(src.replica - first);
  pairing.replicas = static_cast<std::uint32_t>(end - first);
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
  const RankIndex ranks = prefill.rank_count() / prefill.dp;
  for (RankIndex index = prefill_dp * ranks; index < (prefill_dp + 1) * ranks; ++index) {
    const RankCoord src = prefill.coord(index);
    const RankPairing pairing = rank_pairing(model, prefill, src, decode, dst);
    if (!pairing.target) {
      continue;
    }
    out.targets.push_back(index);
    if (pairing.sends(room)) {
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
  const RankIndex ranks = decode.rank_count() / decode.dp;
  for (RankIndex index = decode_dp * ranks; index < (decode_dp + 1) * ranks; ++index) {
    if (rank_pairing(model, prefill, src, decode, decode.coord(index)).target) {
      out.push_back(index);
    }
  }
  return out;
}

}  // namespace kvferry
