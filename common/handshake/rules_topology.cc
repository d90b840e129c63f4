#include <algorithm>

#include "common/handshake/rule_table.h"

namespace kvferry {
namespace {

bool is_mla(const Descriptor& side) {
  return side.geometry.attention == AttentionKind::kMla;
}

/// Whether the geometry is legal and the parallel sizes fit it, apart from heads, which have a rule of their
/// own.
Result<void> validate_sizes(const Descriptor& side) {
  KVF_TRY_VOID(validate(side.geometry));
  ModelGeometry any_heads = side.geometry;
  any_heads.kv_heads = 1;
  return validate(side.topology, any_heads);
}

void check_topology(const PeerPair& pair, RuleReport& report) {
  for (const Descriptor* side : {&pair.prefill, &pair.decode}) {
    const auto valid = validate_sizes(*side);
    if (valid) {
      continue;
    }
    report.error({.field = "topology",
                  .prefill = to_string(pair.prefill.topology),
                  .decode = to_string(pair.decode.topology),
                  .message = fmt::format("the {} topology is not legal: {}", side_name(pair, *side),
                                         valid.error().message),
                  .fix = fmt::format("correct the parallel sizes of the {} side", side_name(pair, *side))});
  }
}

void check_heads(const PeerPair& pair, RuleReport& report) {
  for (const Descriptor* side : {&pair.prefill, &pair.decode}) {
    const std::uint32_t heads = side->geometry.kv_heads;
    const Topology& topology = side->topology;
    const std::uint32_t shards = topology.tp % topology.dcp == 0 ? topology.head_ranks() : topology.tp;
    if (is_mla(*side) || heads % shards == 0 || shards % heads == 0) {
      continue;
    }
    report.error(
        {.field = "topology.tp",
         .prefill =
             fmt::format("{} heads over TP {}", pair.prefill.geometry.kv_heads, pair.prefill.topology.tp),
         .decode = fmt::format("{} heads over TP {}", pair.decode.geometry.kv_heads, pair.decode.topology.tp),
         .message =
             fmt::format("{} KV heads neither divide nor replicate over TP {} on the {} side{}", heads,
                         shards, side_name(pair, *side),
                         topology.dcp > 1 ? fmt::format(" (tp {} / dcp {})", topology.tp, topology.dcp) : ""),
         .fix = fmt::format("choose a {} TP that divides {} or is a multiple of it", side_name(pair, *side),
                            heads)});
  }
}

void check_cp_split(const PeerPair& pair, RuleReport& report) {
  const Topology& decode = pair.decode.topology;
  if (decode.cp == 1 || decode.cp_split == CpSplit::kNone) {
    return;
  }
  report.error(
      {.field = "topology.cp_split",
       .prefill = std::string(to_string(pair.prefill.topology.cp_split)),
       .decode = std::string(to_string(decode.cp_split)),
       .message = fmt::format("decode splits tokens over {} CP ranks ({}), but which of them holds a "
                              "token that it generates is not defined",
                              decode.cp, to_string(decode.cp_split)),
       .fix = "set decode cp_split to none, or use DCP to split tokens on decode"});
}

void check_dcp_interleave(const PeerPair& pair, RuleReport& report) {
  const Topology& prefill = pair.prefill.topology;
  const Topology& decode = pair.decode.topology;
  const auto complain = [&](std::string message, std::string_view fix) {
    report.error({.field = "topology.dcp_interleave",
                  .prefill = fmt::format("{}", prefill.dcp_interleave),
                  .decode = fmt::format("{}", decode.dcp_interleave),
                  .message = std::move(message),
                  .fix = std::string(fix)});
  };
  for (const Descriptor* side : {&pair.prefill, &pair.decode}) {
    const Topology& topology = side->topology;
    if (topology.dcp > 1 && side->page_size % topology.dcp_interleave != 0) {
      complain(fmt::format("{} page size {} is not a multiple of its DCP interleave {}",
                           side_name(pair, *side), side->page_size, topology.dcp_interleave),
               "choose a DCP interleave that divides the page size");
    }
  }
}

constexpr Rule kRules[] = {
    {"topology", check_topology},
    {"heads_divide_or_replicate", check_heads},
    {"cp_split", check_cp_split},
    {"dcp_interleave", check_dcp_interleave},
};

}  // namespace

bool layout_is_legal(const Descriptor& side) {
  return validate(side.topology, side.geometry).has_value();
}

std::span<const Rule> topology_rules() {
  return kRules;
}

}  // namespace kvferry
