#pragma once
// Where one token of a request lies on both sides, and who sends it to whom. Rows and bytes are read from a
// plan of that single token for every pair of ranks that meet.

#include <cstdint>
#include <vector>

#include "common/plan/plan.h"
#include "tools/cli/plan/plan_request.h"

namespace kvferry {

struct TokenPlace {
  std::uint64_t page_index = 0;  // in the request's page list
  std::uint64_t page = 0;
  std::uint64_t slot = 0;  // row of the page
  std::uint64_t row = 0;   // of each buffer
  friend auto operator<=>(const TokenPlace&, const TokenPlace&) = default;
};

/// The part of a row that holds a head group, in every buffer of one kind.
struct RowPart {
  BufferKind kind = BufferKind::kLatent;
  std::uint32_t offset = 0;
  std::uint32_t bytes = 0;
  std::uint32_t row_bytes = 0;
  friend auto operator<=>(const RowPart&, const RowPart&) = default;
};

/// One rank with the heads and layers of the token that it shares with a rank of the other side.
struct TokenHolder {
  RankIndex rank = 0;
  Interval layers;
  Interval heads;
  TokenPlace place;
  std::vector<RowPart> parts;
  friend auto operator<=>(const TokenHolder&, const TokenHolder&) = default;
};

/// Which source is elected for these heads and layers of one destination.
struct TokenElection {
  RankIndex decode = 0;
  Interval layers;
  Interval heads;
  RankIndex prefill = 0;
  std::vector<RankIndex> candidates;  // the elected one among them, ascending
};

struct Explanation {
  std::uint64_t token = 0;
  bool moves = false;                // false: it lies in the prefix, which decode holds already
  std::vector<TokenHolder> prefill;  // by rank, layers, heads; empty when it does not move
  std::vector<TokenHolder> decode;
  std::vector<TokenElection> elections;  // by decode rank, layers, heads
  /// All ranks that own the token, those that send nothing of it included.
  std::vector<RankIndex> prefill_owners;
  std::vector<RankIndex> decode_owners;
};

/// The layouts must have passed check_request(), `token` must be below request.tokens. Errors are the
/// planner's.
Result<Explanation> explain(const PlanRequest& request, std::uint64_t token);

}  // namespace kvferry
