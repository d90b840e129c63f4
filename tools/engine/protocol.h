#pragma once
// JSON lines between the synthetic engine and whoever plays the router (the demo, a test): one object a line,
// commands on the engine's stdin, events on its stdout.
//
//   to prefill {"op":"request","room":R,"tokens":T,"prefix":P,"chunk_tokens":C,"stream":bool,"corrupt":bool,
//               "layer_group":N}      chunks go in groups of N layers; 0, or missing: as a whole
//   to decode    {"op":"expect","room":R,"tokens":T,"prefix":P,"bootstrap":"host:port"}
//   to both      {"op":"abort","room":R,"reason":"..."}  {"op":"stats"}  {"op":"quit"}
//   from both    {"event":"attached"}  {"event":"lost","reason":"..."}  {"event":"refused","reason":"..."}
//                {"event":"failed"|"aborted","room":R,"code":"...","reason":"..."}
//                {"event":"stats","ranks":[{"rank":..,"pages":..,"free":..,"live":..,"quarantined":..,..}]}
//                {"event":"stray","room":R,"reason":"..."}   a final event that nobody may send
//   from prefill {"event":"started","room":R}    the first chunk was accepted
//                {"event":"granted","room":R}    the daemons have met over the room
//                {"event":"corrupted","room":R,"layer":..,"kind":..,"head":..,"position":..,"byte":..}
//                {"event":"landed","room":R,"bytes":..,"transfer_ns":..,"at_ns":..}
//   from decode  {"event":"expected","room":R}   every rank's daemon has accepted the room
//                {"event":"landed",... as prefill,"payload":..,"verified":..,"mismatches":..,"first":{..}}

#include <nlohmann/json.hpp>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/result.h"

namespace kvferry {

inline constexpr std::size_t kProtocolLineMax = 1u << 20;

/// One line as an object; errors say what it is instead.
Result<nlohmann::json> parse_line(std::string_view line);

/// Typed access; errors name the field, its value and the bounds.
Result<std::uint64_t> read_number(const nlohmann::json& object, const char* field, std::uint64_t min,
                                  std::uint64_t max);
Result<std::string> read_text(const nlohmann::json& object, const char* field);
/// False when the field is missing.
bool read_flag(const nlohmann::json& object, const char* field);

/// Splits a byte stream into lines. Lines above kProtocolLineMax are refused.
class LineBuffer {
 public:
  /// Adds what was read and returns the complete lines, without their ends.
  Result<std::vector<std::string>> add(std::string_view bytes);

 private:
  std::string rest_;
};

/// Writes one object as a line to `fd`, completely; false when the reader is gone.
bool write_line(int fd, const nlohmann::json& object);

}  // namespace kvferry
