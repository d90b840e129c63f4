#include "common/handshake/rules.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "common/handshake/rule_table.h"

namespace kvferry {
namespace {

std::array<std::span<const Rule>, 4> all_rules() {
  return {peer_rules(), geometry_rules(), topology_rules(), buffer_rules()};
}

bool offers(const Descriptor& side, std::string_view kind) {
  return std::any_of(side.fabrics.begin(), side.fabrics.end(),
                     [&](const FabricDescription& fabric) { return fabric.kind == kind; });
}

}  // namespace

std::string_view to_string(Severity severity) {
  return severity == Severity::kError ? "error" : "warning";
}

void RuleReport::add(Severity severity, Finding finding) {
  out_.push_back(Violation{.rule = std::string(rule_),
                           .severity = severity,
                           .field = std::string(finding.field),
                           .prefill = std::move(finding.prefill),
                           .decode = std::move(finding.decode),
                           .message = std::move(finding.message),
                           .fix = std::move(finding.fix)});
}

std::vector<Violation> evaluate(const Descriptor& prefill, const Descriptor& decode) {
  const PeerPair pair{prefill, decode};
  std::vector<Violation> out;
  for (const std::span<const Rule> group : all_rules()) {
    for (const Rule& rule : group) {
      RuleReport report(rule.id, out);
      rule.check(pair, report);
    }
  }
  return out;
}

bool refuses(const std::vector<Violation>& violations) {
  return std::any_of(violations.begin(), violations.end(),
                     [](const Violation& violation) { return violation.severity == Severity::kError; });
}

const std::vector<std::string_view>& rule_ids() {
  static const std::vector<std::string_view> ids = [] {
    std::vector<std::string_view> out;
    for (const std::span<const Rule> group : all_rules()) {
      for (const Rule& rule : group) {
        out.push_back(rule.id);
      }
    }
    return out;
  }();
  return ids;
}

std::optional<std::string> choose_fabric(const Descriptor& prefill, const Descriptor& decode) {
  const bool same_host = !prefill.host_id.empty() && prefill.host_id == decode.host_id;
  for (const FabricDescription& fabric : prefill.fabrics) {
    if (offers(decode, fabric.kind) && (fabric.kind != "shm" || same_host)) {
      return fabric.kind;
    }
  }
  return std::nullopt;
}

std::optional<std::uint32_t> agreed_protocol(const Descriptor& prefill, const Descriptor& decode) {
  const std::uint32_t lowest = std::max(prefill.protocol_min, decode.protocol_min);
  const std::uint32_t highest = std::min(prefill.protocol_max, decode.protocol_max);
  return lowest <= highest ? std::optional(highest) : std::nullopt;
}

nlohmann::json violation_to_json(const Violation& violation) {
  return {{"rule", violation.rule},     {"severity", to_string(violation.severity)},
          {"field", violation.field},   {"prefill", violation.prefill},
          {"decode", violation.decode}, {"message", violation.message},
          {"fix", violation.fix}};
}

Violation violation_from_json(JsonObject object) {
  constexpr std::size_t kLong = 8192;
  Violation out;
  out.rule = object.text("rule", 1, DescriptorLimits::kText);
  const std::string severity = object.text("severity", 1, DescriptorLimits::kText);
  if (severity == to_string(Severity::kWarning)) {
    out.severity = Severity::kWarning;
  } else if (severity != to_string(Severity::kError)) {
    object.wrong("severity", fmt::format("expected error or warning, got '{}'", severity));
  }
  out.field = object.text_or("field", kLong, "");
  out.prefill = object.text_or("prefill", kLong, "");
  out.decode = object.text_or("decode", kLong, "");
  out.message = object.text("message", 0, kLong);
  out.fix = object.text_or("fix", kLong, "");
  return out;
}

}  // namespace kvferry
