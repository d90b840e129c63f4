#pragma once
// The rules themselves, one function each. Internal to common/handshake: use rules.h.

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/handshake/rules.h"

namespace kvferry {

struct PeerPair {
  const Descriptor& prefill;
  const Descriptor& decode;
};

/// "prefill" or "decode": which of the two `side` is, whatever role it claims.
inline std::string_view side_name(const PeerPair& pair, const Descriptor& side) {
  return &side == &pair.prefill ? "prefill" : "decode";
}

/// Where a rule writes what it found; fills in the rule's id.
class RuleReport {
 public:
  RuleReport(std::string_view rule, std::vector<Violation>& out) : rule_(rule), out_(out) {}

  struct Finding {
    std::string_view field;
    std::string prefill;
    std::string decode;
    std::string message;
    std::string fix;
  };
  void error(Finding finding) { add(Severity::kError, std::move(finding)); }
  /// Some rule, this or one before it, has reported an error.
  bool refused() const { return refuses(out_); }
  void warning(Finding finding) { add(Severity::kWarning, std::move(finding)); }

 private:
  void add(Severity severity, Finding finding);

  std::string_view rule_;
  std::vector<Violation>& out_;  // evaluate()'s, which outlives every report
};

struct Rule {
  std::string_view id;
  void (*check)(const PeerPair& pair, RuleReport& report);
};

std::span<const Rule> peer_rules();      // role, protocol, model identity, fabrics, local ranks
std::span<const Rule> geometry_rules();  // what the model and its rows look like
std::span<const Rule> topology_rules();  // parallel sizes
std::span<const Rule> buffer_rules();    // pool entries, aux schema, state components

/// True when ownership() may be asked about this side: its topology is legal for its geometry.
bool layout_is_legal(const Descriptor& side);

/// "0-23,30" for ascending ids; cut with "..." when long. "none" for an empty list.
std::string id_ranges(const std::vector<std::uint32_t>& ids);

}  // namespace kvferry
