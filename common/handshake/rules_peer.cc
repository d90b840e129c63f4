#include <set>

#include "common/handshake/rule_table.h"

namespace kvferry {
namespace {

void check_role(const PeerPair& pair, RuleReport& report) {
  if (pair.prefill.role == Role::kPrefill && pair.decode.role == Role::kDecode) {
    return;
  }
  report.error({.field = "role",
                .prefill = std::string(to_string(pair.prefill.role)),
                .decode = std::string(to_string(pair.decode.role)),
                .message = fmt::format("a transfer needs one prefill and one decode daemon, but the prefill "
                                       "side says {} and the decode side says {}",
                                       to_string(pair.prefill.role), to_string(pair.decode.role)),
                .fix = "point the decode daemon at the address of a prefill daemon"});
}

void check_protocol(const PeerPair& pair, RuleReport& report) {
  if (agreed_protocol(pair.prefill, pair.decode)) {
    return;
  }
  const auto range = [](const Descriptor& side) {
    return fmt::format("{} to {}", side.protocol_min, side.protocol_max);
  };
  report.error(
      {.field = "protocol_max",
       .prefill = range(pair.prefill),
       .decode = range(pair.decode),
       .message = fmt::format("no common protocol version: prefill speaks {}, decode speaks {}",
                              range(pair.prefill), range(pair.decode)),
       .fix = fmt::format("upgrade the {} daemon (builds: prefill {}, decode {})",
                          pair.prefill.protocol_max < pair.decode.protocol_max ? "prefill" : "decode",
                          pair.prefill.build, pair.decode.build)});
}

bool both_known_and_differ(const std::string& a, const std::string& b) {
  return !a.empty() && !b.empty() && a != b;
}

// The same checkpoint often has different names (a path on one host, a hub name on the other), so equal
// hashes settle it; without hashes the name is all there is.
void check_model(const PeerPair& pair, RuleReport& report) {
  const ModelIdentity& prefill = pair.prefill.model;
  const ModelIdentity& decode = pair.decode.model;
  if (both_known_and_differ(prefill.hash, decode.hash)) {
    report.error(
        {.field = "model.hash",
         .prefill = prefill.hash,
         .decode = decode.hash,
         .message = fmt::format("models differ: prefill serves {} with hash {}, decode {} with hash {}",
                                prefill.name, prefill.hash, decode.name, decode.hash),
         .fix = "serve the same checkpoint on both sides"});
    return;
  }
  const bool same_hash = !prefill.hash.empty() && prefill.hash == decode.hash;
  if (!same_hash && both_known_and_differ(prefill.name, decode.name)) {
    report.error({.field = "model.name",
                  .prefill = prefill.name,
                  .decode = decode.name,
                  .message = fmt::format("models differ: prefill serves {}, decode serves {}", prefill.name,
                                         decode.name),
                  .fix = "serve the same model, or give both sides the same model name or hash"});
  }
}

void check_model_revision(const PeerPair& pair, RuleReport& report) {
  const std::string& prefill = pair.prefill.model.revision;
  const std::string& decode = pair.decode.model.revision;
  if (!both_known_and_differ(prefill, decode)) {
    return;
  }
  report.warning(
      {.field = "model.revision",
       .prefill = prefill,
       .decode = decode,
       .message = fmt::format("model revisions differ: prefill {}, decode {}; the bytes fit, but may "
                              "mean something else",
                              prefill, decode),
       .fix = "serve the same revision on both sides"});
}

std::string kinds(const Descriptor& side) {
  std::string out;
  for (const FabricDescription& fabric : side.fabrics) {
    out += (out.empty() ? "" : ",") + fabric.kind;
  }
  return out.empty() ? "none" : out;
}

void check_fabrics(const PeerPair& pair, RuleReport& report) {
  if (choose_fabric(pair.prefill, pair.decode)) {
    return;
  }
  report.error({.field = "fabrics",
                .prefill = kinds(pair.prefill),
                .decode = kinds(pair.decode),
                .message = fmt::format(
                    "no common fabric: prefill offers {} on host '{}', decode offers {} on "
                    "host '{}'",
                    kinds(pair.prefill), pair.prefill.host_id, kinds(pair.decode), pair.decode.host_id),
                .fix = "enable one fabric on both sides; shm counts only when both daemons share a host"});
}

/// What is wrong with one side's list of local ranks, or an empty text.
std::string rank_problem(const Descriptor& side) {
  if (side.ranks.empty()) {
    return "has no rank attached";
  }
  std::set<RankIndex> seen;
  for (const RankDescription& rank : side.ranks) {
    const std::uint64_t count =
        std::uint64_t{side.topology.tp} * side.topology.pp * side.topology.cp * side.topology.dp;
    if (rank.index >= count) {
      return fmt::format("has rank {}, but tp*pp*cp*dp gives ranks 0 to {}", rank.index, count - 1);
    }
    const RankCoord expected = side.topology.coord(rank.index);
    if (rank.coord != expected) {
      return fmt::format(
          "says rank {} is tp {} pp {} cp {} dp {}, but its topology makes it tp {} pp {} cp {} "
          "dp {}",
          rank.index, rank.coord.tp, rank.coord.pp, rank.coord.cp, rank.coord.dp, expected.tp, expected.pp,
          expected.cp, expected.dp);
    }
    if (!seen.insert(rank.index).second) {
      return fmt::format("lists rank {} twice", rank.index);
    }
  }
  return {};
}

void check_ranks(const PeerPair& pair, RuleReport& report) {
  for (const Descriptor* side : {&pair.prefill, &pair.decode}) {
    const std::string problem = rank_problem(*side);
    if (problem.empty()) {
      continue;
    }
    const std::string_view name = side_name(pair, *side);
    report.error({.field = "ranks",
                  .prefill = fmt::format("{} local ranks", pair.prefill.ranks.size()),
                  .decode = fmt::format("{} local ranks", pair.decode.ranks.size()),
                  .message = fmt::format("the {} side {}", name, problem),
                  .fix = fmt::format(
                      "attach the {} engines with the ranks of their topology, then connect again", name)});
  }
}

constexpr Rule kRules[] = {
    {"role", check_role},       {"protocol", check_protocol},
    {"model", check_model},     {"model_revision", check_model_revision},
    {"fabrics", check_fabrics}, {"ranks", check_ranks},
};

}  // namespace

std::span<const Rule> peer_rules() {
  return kRules;
}

}  // namespace kvferry
