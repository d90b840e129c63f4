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

void check_tp_divisibility(const PeerPair& pair, RuleReport& report) {
  const std::uint32_t prefill = pair.prefill.topology.tp;
  const std::uint32_t decode = pair.decode.topology.tp;
  if (std::max(prefill, decode) % std::min(prefill, decode) == 0) {
    return;
  }
  report.error({.field = "topology.tp",
                .prefill = fmt::format("{}", prefill),
                .decode = fmt::format("{}", decode),
                .message = fmt::format("attention TP sizes {} (prefill) and {} (decode) are not multiples of "
                                       "each other",
                                       prefill, decode),
                .fix = "choose TP sizes of which the larger is a multiple of the smaller"});
}

void check_heads(const PeerPair& pair, RuleReport& report) {
  for (const Descriptor* side : {&pair.prefill, &pair.decode}) {
    const std::uint32_t heads = side->geometry.kv_heads;
    const std::uint32_t tp = side->topology.tp;
    if (is_mla(*side) || heads % tp == 0 || tp % heads == 0) {
      continue;
    }
    report.error(
        {.field = "topology.tp",
         .prefill =
             fmt::format("{} heads over TP {}", pair.prefill.geometry.kv_heads, pair.prefill.topology.tp),
         .decode = fmt::format("{} heads over TP {}", pair.decode.geometry.kv_heads, pair.decode.topology.tp),
         .message = fmt::format("{} KV heads neither divide nor replicate over TP {} on the {} side", heads,
                                tp, side_name(pair, *side)),
         .fix = fmt::format("choose a {} TP that divides {} or is a multiple of it", side_name(pair, *side),
                            heads)});
  }
}

void check_cp(const PeerPair& pair, RuleReport& report) {
  const std::uint32_t prefill = pair.prefill.topology.cp;
  const std::uint32_t decode = pair.decode.topology.cp;
  if (decode != 1) {
    report.error(
        {.field = "topology.cp",
         .prefill = fmt::format("{}", prefill),
         .decode = fmt::format("{}", decode),
         .message = fmt::format("decode attention CP must be 1: prefill {}, decode {}", prefill, decode),
         .fix = "start decode without attention context parallelism (DCP is another setting)"});
  }
}

void check_pp(const PeerPair& pair, RuleReport& report) {
  const std::uint32_t prefill = pair.prefill.topology.pp;
  const std::uint32_t decode = pair.decode.topology.pp;
  if (decode != 1 && decode != prefill) {
    report.error({.field = "topology.pp",
                  .prefill = fmt::format("{}", prefill),
                  .decode = fmt::format("{}", decode),
                  .message = fmt::format("decode PP must be 1 or equal to prefill PP: prefill {}, decode {}",
                                         prefill, decode),
                  .fix = fmt::format("set decode PP to 1 or {}", prefill)});
  }
}

std::string dcp_phrase(const PeerPair& pair) {
  return fmt::format("Unsupported PD DCP topology: {} -> {}", pair.prefill.topology.dcp,
                     pair.decode.topology.dcp);
}

void report_dcp(const PeerPair& pair, std::string message, std::string fix, RuleReport& report) {
  report.error({.field = "topology.dcp",
                .prefill = fmt::format("{}", pair.prefill.topology.dcp),
                .decode = fmt::format("{}", pair.decode.topology.dcp),
                .message = std::move(message),
                .fix = std::move(fix)});
}

void check_dcp_topology(const PeerPair& pair, RuleReport& report) {
  const std::uint32_t prefill = pair.prefill.topology.dcp;
  const std::uint32_t decode = pair.decode.topology.dcp;
  if (prefill != decode && prefill != 1) {
    report_dcp(pair, fmt::format("{} (prefill DCP {}, decode DCP {})", dcp_phrase(pair), prefill, decode),
               fmt::format("set prefill DCP to 1 or to {}", decode), report);
  }
}

void check_dcp_mla_only(const PeerPair& pair, RuleReport& report) {
  if (pair.decode.topology.dcp > 1 && !is_mla(pair.decode)) {
    report_dcp(pair,
               fmt::format("decode DCP needs an MLA pool, but decode serves {}; {}",
                           to_string(pair.decode.geometry.attention), dcp_phrase(pair)),
               "set decode DCP to 1 for models without MLA", report);
  }
}

void check_dcp_cp(const PeerPair& pair, RuleReport& report) {
  if (pair.decode.topology.dcp > 1 && pair.prefill.topology.cp != 1) {
    report.error(
        {.field = "topology.cp",
         .prefill = fmt::format("cp={}", pair.prefill.topology.cp),
         .decode = fmt::format("dcp={}", pair.decode.topology.dcp),
         .message = fmt::format("decode DCP needs prefill attention CP=1: prefill CP {}, decode DCP {}",
                                pair.prefill.topology.cp, pair.decode.topology.dcp),
         .fix = "set prefill attention CP to 1, or decode DCP to 1"});
  }
}

// Pages move whole between equal DCP sizes, so every prefill rank that a decode rank asks must hold the same
// token class. With a larger TP on one side some pair always differs.
void check_dcp_ranks(const PeerPair& pair, RuleReport& report) {
  const Topology& prefill = pair.prefill.topology;
  const Topology& decode = pair.decode.topology;
  if (prefill.dcp != decode.dcp || prefill.dcp == 1 || prefill.tp == decode.tp) {
    return;
  }
  const std::uint32_t down = std::max(1U, prefill.tp / decode.tp);
  const std::uint32_t up = std::max(1U, decode.tp / prefill.tp);
  for (std::uint32_t rank = 0; rank < decode.tp; ++rank) {
    for (std::uint32_t i = 0; i < down; ++i) {
      const std::uint32_t source = rank / up * down + i;
      if (source % prefill.dcp == rank % decode.dcp) {
        continue;
      }
      report.error({.field = "topology.dcp",
                    .prefill = fmt::format("rank {} = DCP rank {}", source, source % prefill.dcp),
                    .decode = fmt::format("rank {} = DCP rank {}", rank, rank % decode.dcp),
                    .message = fmt::format(
                        "PD peers must connect matching DCP ranks: with TP {} and {} decode "
                        "rank {} (DCP rank {}) meets prefill rank {} (DCP rank {})",
                        prefill.tp, decode.tp, rank, rank % decode.dcp, source, source % prefill.dcp),
                    .fix = "set the same TP on both sides, or prefill DCP to 1"});
      return;
    }
  }
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
  if (prefill.dcp == decode.dcp && prefill.dcp > 1 && prefill.dcp_interleave != decode.dcp_interleave) {
    complain(fmt::format("DCP interleave differs: prefill {}, decode {}", prefill.dcp_interleave,
                         decode.dcp_interleave),
             "set the same DCP interleave on both sides");
  }
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
    {"tp_divisibility", check_tp_divisibility},
    {"heads_divide_or_replicate", check_heads},
    {"cp", check_cp},
    {"pp", check_pp},
    {"dcp_topology", check_dcp_topology},
    {"dcp_mla_only", check_dcp_mla_only},
    {"dcp_cp", check_dcp_cp},
    {"dcp_ranks", check_dcp_ranks},
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
