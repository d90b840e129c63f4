#pragma once
// Request traces in the Mooncake format: one JSON object a line with `timestamp` (ms), `input_length` and
// `output_length` (tokens) and `hash_ids`, one id per block of 512 tokens; equal leading ids are an equal
// prefix. Read from a file, or generated with the same properties from a seed.

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "common/base/result.h"

namespace kvferry {

inline constexpr std::uint64_t kTraceBlockTokens = 512;
inline constexpr std::uint64_t kTraceTokensMax = 10'000'000;
inline constexpr std::uint64_t kTraceRowsMax = 1'000'000;
inline constexpr std::uint64_t kTraceFileBytesMax = 1ull << 30;

struct TraceRequest {
  std::uint64_t timestamp_ms = 0;
  std::uint64_t input_tokens = 0;
  std::uint64_t output_tokens = 0;
  std::vector<std::uint64_t> hash_ids;
  friend bool operator==(const TraceRequest&, const TraceRequest&) = default;
};

/// At most `rows_max` requests of `text`; blank lines are skipped. Errors read "source:line: field x: ...".
Result<std::vector<TraceRequest>> parse_trace(std::string_view text, std::string_view source,
                                              std::uint64_t rows_max = kTraceRowsMax);
Result<std::vector<TraceRequest>> load_trace(const std::string& path, std::uint64_t rows_max = kTraceRowsMax);

/// Conversations with shared system prompts and growing history: most inputs of a few hundred to a few
/// thousand tokens, a tail of long ones. The same seed gives the same trace.
std::vector<TraceRequest> generate_trace(std::uint64_t rows, std::uint64_t seed);
std::string print_trace(const std::vector<TraceRequest>& trace);

/// The blocks that a decode side has seen, for prefix hits.
class PrefixCache {
 public:
  /// Tokens of the request whose leading blocks have all been seen, at most its input length.
  std::uint64_t hit_tokens(const TraceRequest& request) const;
  /// Remembers the blocks that lie completely within the first `tokens` tokens.
  void add(const TraceRequest& request, std::uint64_t tokens);

 private:
  std::unordered_set<std::uint64_t> seen_;
};

}  // namespace kvferry
