#pragma once
// Which ranks talk to which (pd-spec 4.2 to 4.4), seen from either side. "Targets" are all prefill ranks a
// decode rank grants to; "sources" those among them that send it bytes; the others are dummies: they finish
// with the request, write nothing and report nothing.

#include <cstdint>
#include <vector>

#include "common/base/ids.h"
#include "common/topology/topology.h"

namespace kvferry {

struct DecodeTargets {
  std::vector<RankIndex> targets;  // prefill ranks that receive a grant, ascending
  std::vector<RankIndex> sources;  // subset that sends and must report before the room has landed
  RankIndex aux_source = 0;        // the one that also sends the aux row: last PP stage, lowest source
  std::uint32_t required_dst_info_num = 1;          // grants a prefill rank waits for (D/S, or 1)
  std::uint32_t required_prefill_response_num = 1;  // == sources.size()
};

/// Which of `replicas` copies of the same bytes sends for `room`. Mixed, not room % replicas: routers number
/// rooms consecutively and pick the DP rank by room % dp, which would leave replicas of a DP rank without
/// work. Part of the protocol: both daemons must elect the same.
std::uint32_t elected_replica(Room room, std::uint32_t replicas);

/// How one prefill rank stands to one decode rank; the only place that decides it. `replica` of `replicas`:
/// the prefill ranks among the decode rank's targets that own the same (layer, head, token) coordinates.
/// Replicas are dealt out over the destinations that hold the same heads and some of their layers and tokens,
/// in their order: with fewer replicas than destinations each serves its share of them, with more each
/// destination has a group of its own and elects within it by room. So no replica's share differs from
/// another's by more than one destination, and none is idle for good. Prefill CP ranks above 0 that do not
/// split the tokens stand where their CP rank 0 stands, and are never elected (replica == replicas).
struct RankPairing {
  bool target = false;  // false: the two never meet, the rest is meaningless
  std::uint32_t replica = 0;
  std::uint32_t replicas = 1;

  /// Whether it sends for any room at all.
  bool ever_sends() const { return target && replica < replicas; }
  bool sends(Room room) const { return target && elected_replica(room, replicas) == replica; }
};
RankPairing rank_pairing(const ModelGeometry& model, const Topology& prefill, const RankCoord& prefill_coord,
                         const Topology& decode, const RankCoord& decode_coord,
                         RowSpace space = RowSpace::kTokens);

/// The spaces in which two ranks of this model can pair on their own: windows go with the tokens.
std::vector<RowSpace> pairing_spaces(const ModelGeometry& model);

/// What must hold before ranks can be mapped: both sides valid, and no CP split on decode (whose share of the
/// tokens that it will generate is not defined). Nothing relates the two topologies to each other. Every
/// violation is in the one message (kMismatch).
Result<void> validate_pair(const ModelGeometry& model, const Topology& prefill, const Topology& decode);

/// Targets of decode rank `decode_rank` for `room`, routed to prefill DP rank `prefill_dp`.
/// Elected replicas (MLA with prefill TP > decode TP; prefill TP > heads) spread over sources by room.
/// Both topologies must have passed validate_pair() (the compatibility rules include it).
DecodeTargets decode_targets(const ModelGeometry& model, const Topology& prefill, const Topology& decode,
                             RankIndex decode_rank, std::uint32_t prefill_dp, Room room);

/// The decode ranks whose grant prefill rank `prefill_rank` must see before a room is complete, ascending:
/// those of decode DP rank `decode_dp` for which decode_targets() names it.
std::vector<RankIndex> prefill_destinations(const ModelGeometry& model, const Topology& prefill,
                                            const Topology& decode, RankIndex prefill_rank,
                                            std::uint32_t decode_dp);

}  // namespace kvferry
