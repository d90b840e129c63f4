#pragma once
// Everything that `kvferry plan` finds out, before it is printed. Pure: the same options give the same report
// on every machine.

#include <cstdint>
#include <optional>
#include <vector>

#include "common/plan/plan.h"
#include "tools/cli/plan/explain.h"
#include "tools/cli/plan/plan_options.h"
#include "tools/cli/plan/plan_request.h"

namespace kvferry {

/// One source and one destination, or all of them together.
struct PlanFigures {
  std::uint64_t bytes = 0;
  std::uint64_t rows = 0;  // of one buffer
  std::uint64_t runs = 0;
  std::uint64_t naive_writes = 0;  // one per token and buffer
  WriteCount writes;
  std::uint64_t posted = 0;         // the writes of the fabric that is timed
  std::uint64_t staging_bytes = 0;  // of its ring; one ring per source, so a sum means nothing
  double seconds = 0;               // of the source's time
};

struct PairReport {
  RankIndex prefill = 0;
  RankIndex decode = 0;
  std::uint32_t buffers = 0;
  PlanFigures figures;
};

struct SourceReport {
  RankIndex rank = 0;
  std::uint32_t destinations = 0;
  PlanFigures figures;
};

struct OwnedTokens {
  RankIndex rank = 0;
  std::uint64_t tokens = 0;  // of those that move
};

/// One run with the tokens of its first and last row.
struct RunReport {
  std::uint64_t first_token = 0;
  std::uint64_t last_token = 0;
  RowRun run;
};

struct PairRuns {
  RankIndex prefill = 0;
  RankIndex decode = 0;
  RowSpace part = RowSpace::kTokens;  // kState: its one row is no token
  std::uint64_t total = 0;
  std::vector<RunReport> shown;  // the first ones, as many as the limit allows
};

struct PlanReport {
  PlanRequest request;
  std::vector<Violation> findings;  // what the rules and the planner say against it, and warnings
  std::vector<OwnedTokens> decode_tokens;
  std::vector<PairReport> pairs;      // that send, by prefill and decode rank
  std::vector<SourceReport> sources;  // that send, by rank
  PlanFigures total;
  double seconds = 0;  // of the slowest source
  double balance = 0;  // bytes of the busiest source against their mean over those that send; 0 = none sends
  std::uint64_t hash = 0;
  std::vector<PairRuns> runs;  // with PlanOptions::pages
  std::optional<Explanation> explanation;

  bool supported() const { return !refuses(findings); }
};

/// kInvalid: wrong usage. A plan that is refused is a report that says why.
Result<PlanReport> make_report(const PlanOptions& options);

/// "rank 3", "ranks 0-3,8"; a long list is cut and counted: "ranks 0,2,4,... (512 in all)".
std::string ranks_text(const std::vector<RankIndex>& ranks);

}  // namespace kvferry
