#pragma once
// Whether one prefill daemon and one decode daemon fit. Both run the same rules over the same two
// Descriptors and so reach the same answer; every violated rule is listed, never only the first. A violation
// refuses this pair of peers and nothing else. Key phrases of SGLang's own refusals ("Page size mismatch",
// "Unsupported PD DCP topology: n -> N") are kept because operators search for them. Pure: no I/O, no clock.

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/handshake/descriptor.h"
#include "common/handshake/json_reader.h"

namespace kvferry {

enum class Severity : std::uint8_t { kError, kWarning };
std::string_view to_string(Severity severity);  // "error", "warning"

struct Violation {
  std::string rule;  // one of rule_ids(); a metric label
  Severity severity = Severity::kError;
  std::string field;    // dotted path in the Descriptor
  std::string prefill;  // value on the prefill side, as text
  std::string decode;   // value on the decode side
  std::string message;  // one sentence with both values
  std::string fix;      // what the operator changes
  friend bool operator==(const Violation&, const Violation&) = default;
};

/// All violations, in the order of rule_ids(); empty = the two fit. Any two well-formed Descriptors are safe.
std::vector<Violation> evaluate(const Descriptor& prefill, const Descriptor& decode);

/// True when at least one violation is an error; warnings alone do not refuse.
bool refuses(const std::vector<Violation>& violations);

/// The id of every rule there is, so that metrics exist before anything is refused.
const std::vector<std::string_view>& rule_ids();

/// The first fabric in the prefill side's order that decode offers as well and that can work between the two
/// hosts (shm needs equal, known host ids).
std::optional<std::string> choose_fabric(const Descriptor& prefill, const Descriptor& decode);

/// The highest protocol version both speak; nullopt when the ranges do not overlap.
std::optional<std::uint32_t> agreed_protocol(const Descriptor& prefill, const Descriptor& decode);

nlohmann::json violation_to_json(const Violation& violation);
/// Notes what is wrong in the object's errors; the result counts only if there are none.
Violation violation_from_json(JsonObject object);

}  // namespace kvferry
