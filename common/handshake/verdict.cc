#include "common/handshake/verdict.h"

#include <algorithm>

#include "common/handshake/descriptor_json.h"
#include "common/topology/rank_map.h"

namespace kvferry {
namespace {

using nlohmann::json;
using Limits = DescriptorLimits;

constexpr std::size_t kBytesMax = 2 * Limits::kBytes;
constexpr std::size_t kViolationsMax = 512;
constexpr std::size_t kEntriesMax = 65536;

json entry_to_json(const RankMapEntry& entry) {
  return {{"decode_rank", entry.decode_rank},
          {"prefill_dp", entry.prefill_dp},
          {"targets", entry.targets},
          {"sources", entry.sources},
          {"required_dst_info_num", entry.required_dst_info_num},
          {"required_prefill_response_num", entry.required_prefill_response_num}};
}

bool ascending(const std::vector<RankIndex>& ranks) {
  return std::adjacent_find(ranks.begin(), ranks.end(), std::greater_equal<>{}) == ranks.end();
}

RankMapEntry entry_from_json(JsonObject object, const Topology& prefill) {
  constexpr auto kRank = static_cast<std::uint32_t>(Limits::kRanksTotal - 1);
  RankMapEntry out;
  out.decode_rank = object.number32("decode_rank", 0, kRank);
  out.prefill_dp = object.number32("prefill_dp", 0, prefill.dp - 1);
  object.find("targets", true);
  object.find("sources", true);
  out.targets = object.numbers32_or_empty("targets", prefill.rank_count() - 1, Limits::kRanksTotal);
  out.sources = object.numbers32_or_empty("sources", prefill.rank_count() - 1, Limits::kRanksTotal);
  if (!ascending(out.targets) || !ascending(out.sources)) {
    object.wrong("targets", "targets and sources must ascend");
  } else if (!std::includes(out.targets.begin(), out.targets.end(), out.sources.begin(), out.sources.end())) {
    object.wrong("sources", "every source must also be a target");
  }
  out.required_dst_info_num = object.number32("required_dst_info_num", 1, kRank + 1);
  out.required_prefill_response_num = object.number32("required_prefill_response_num", 1, kRank + 1);
  return out;
}

/// What the parts of a verdict owe each other.
void check_whole(const Verdict& verdict, JsonErrors& errors) {
  if (verdict.prefill.role != Role::kPrefill) {
    errors.add("prefill.role", "expected prefill, got decode");
  }
  if (!verdict.accepted) {
    if (!refuses(verdict.violations)) {
      errors.add("violations", "refused without an error violation");
    }
    return;
  }
  if (refuses(verdict.violations)) {
    errors.add("violations", "accepted with an error violation");
  }
  if (verdict.fabric.empty() || verdict.protocol == 0 || verdict.rank_map.empty()) {
    errors.add("", "accepted without fabric, protocol or rank_map");
  }
}

}  // namespace

std::vector<RankMapEntry> map_ranks(const Descriptor& prefill, const Descriptor& decode) {
  std::vector<RankMapEntry> out;
  for (const RankDescription& rank : decode.ranks) {
    for (std::uint32_t dp = 0; dp < prefill.topology.dp; ++dp) {
      DecodeTargets any =
          decode_targets(prefill.geometry, prefill.topology, decode.topology, rank.index, dp, 1);
      RankMapEntry entry{.decode_rank = rank.index,
                         .prefill_dp = dp,
                         .targets = std::move(any.targets),
                         .sources = {},
                         .required_dst_info_num = any.required_dst_info_num,
                         .required_prefill_response_num = any.required_prefill_response_num};
      for (const RankIndex target : entry.targets) {
        const RankPairing pairing =
            rank_pairing(prefill.geometry, prefill.topology, prefill.topology.coord(target), decode.topology,
                         decode.topology.coord(rank.index));
        if (pairing.replicas == 1) {
          entry.sources.push_back(target);
        }
      }
      out.push_back(std::move(entry));
    }
  }
  return out;
}

Verdict judge(const Descriptor& prefill, const Descriptor& decode, std::uint64_t session) {
  Verdict out;
  out.prefill = prefill;
  out.violations = evaluate(prefill, decode);
  out.accepted = !refuses(out.violations);
  if (out.accepted) {
    out.session = session;
    out.fabric = choose_fabric(prefill, decode).value();
    out.protocol = agreed_protocol(prefill, decode).value();
    out.rank_map = map_ranks(prefill, decode);
  }
  return out;
}

std::string encode_verdict(const Verdict& verdict) {
  json out = {{"accepted", verdict.accepted},
              {"violations", json::array()},
              {"prefill", descriptor_to_json(verdict.prefill)},
              {"session", to_hex16(verdict.session)},
              {"fabric", verdict.fabric},
              {"protocol", verdict.protocol},
              {"rank_map", json::array()}};
  for (const Violation& violation : verdict.violations) {
    out["violations"].push_back(violation_to_json(violation));
  }
  for (const RankMapEntry& entry : verdict.rank_map) {
    out["rank_map"].push_back(entry_to_json(entry));
  }
  return dump_json(out);
}

Result<Verdict> decode_verdict(std::string_view text) {
  KVF_TRY(const json document, parse_outside_json(text, kBytesMax, "verdict"));
  JsonErrors errors;
  JsonObject object(document, "", errors);
  Verdict out;
  out.accepted = object.boolean("accepted");
  const json& violations = object.array("violations", kViolationsMax);
  for (std::size_t i = 0; i < violations.size(); ++i) {
    out.violations.push_back(
        violation_from_json(JsonObject(violations[i], element_path("violations", i), errors)));
  }
  out.prefill = descriptor_from_json(object.object("prefill"));
  out.session = object.hex16("session");
  out.fabric = object.text("fabric", 0, Limits::kText);
  out.protocol = object.number32("protocol", 0, UINT32_MAX);
  const json& entries = object.array("rank_map", kEntriesMax);
  if (errors.empty()) {  // the entries are checked against the topology, so it must be sound
    for (std::size_t i = 0; i < entries.size(); ++i) {
      out.rank_map.push_back(
          entry_from_json(JsonObject(entries[i], element_path("rank_map", i), errors), out.prefill.topology));
    }
    check_whole(out, errors);
  }
  if (!errors.empty()) {
    return fail(errors.error("verdict"));
  }
  return out;
}

}  // namespace kvferry
