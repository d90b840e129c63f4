#pragma once
// The answer to POST /v1/handshake. The prefill daemon makes it; the decode daemon reads it, and runs the
// same rules on the enclosed Descriptor before it believes `accepted`. Same conventions as descriptor.h.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/handshake/descriptor.h"
#include "common/handshake/rules.h"

namespace kvferry {

/// Whom one decode rank meets when the router sends a room to prefill DP rank `prefill_dp`: what
/// decode_targets() says of every room. `sources` send for every room; the other targets are replicas that
/// take turns by room.
struct RankMapEntry {
  RankIndex decode_rank = 0;
  std::uint32_t prefill_dp = 0;
  std::vector<RankIndex> targets;  // ascending
  std::vector<RankIndex> sources;  // ascending subset of targets
  std::uint32_t required_dst_info_num = 1;
  std::uint32_t required_prefill_response_num = 1;
  friend bool operator==(const RankMapEntry&, const RankMapEntry&) = default;
};

struct Verdict {
  bool accepted = false;
  std::vector<Violation> violations;  // with `accepted`, warnings only
  Descriptor prefill;
  std::uint64_t session = 0;           // the prefill daemon's token for this pair; 0 when refused
  std::string fabric;                  // empty when refused
  std::uint32_t protocol = 0;          // 0 when refused
  std::vector<RankMapEntry> rank_map;  // per local decode rank and prefill DP rank; empty when refused
};

/// Runs the rules and, where they accept, fills in fabric, protocol and rank map. `session` is the caller's
/// fresh random token.
Verdict judge(const Descriptor& prefill, const Descriptor& decode, std::uint64_t session);

/// Entries for the local ranks of `decode`; the two must have passed the rules.
std::vector<RankMapEntry> map_ranks(const Descriptor& prefill, const Descriptor& decode);

std::string encode_verdict(const Verdict& verdict);

/// kInvalid names every wrong field; also refused: `accepted` with an error violation or without a fabric,
/// `accepted: false` without a reason, and a rank map that names ranks outside the prefill topology.
Result<Verdict> decode_verdict(std::string_view text);

}  // namespace kvferry
