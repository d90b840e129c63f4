#pragma once
// The request that is planned: both layouts, the pages of every rank, the tokens that move. Pages are made
// up, because no engine is asked: every rank of a side has the same list.

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <vector>

#include "common/base/result.h"
#include "common/handshake/rules.h"
#include "common/model/geometry.h"
#include "common/topology/topology.h"
#include "tools/cli/plan/plan_options.h"
#include "tools/cli/plan/write_count.h"

namespace kvferry {

/// One side. Only the ranks of one DP rank take part in a request.
struct PlannedSide {
  Topology topology;
  std::uint32_t page_size = 0;
  std::uint32_t dp_rank = 0;
  std::uint64_t first_token = 0;     // pages[0] begins with it
  std::vector<std::uint32_t> pages;  // of every rank
  std::uint64_t window_first = 0;    // window_pages[0] begins with it
  std::vector<std::uint32_t> window_pages;

  /// Tokens that one page of all DCP ranks together covers.
  std::uint64_t virtual_page() const { return std::uint64_t{page_size} * topology.dcp; }
  /// Pages that tokens [first_token, end) need.
  std::uint64_t pages_for(std::uint64_t end) const {
    return (end - first_token + virtual_page() - 1) / virtual_page();
  }
  std::uint64_t pool_pages() const {
    std::uint32_t last = pages.empty() ? 0 : pages.back();
    last = window_pages.empty() ? last : std::max(last, window_pages.back());
    return std::uint64_t{last} + 1;
  }
  /// Of the DP rank. The topology must be valid.
  std::uint32_t rank_count() const { return topology.rank_count() / topology.dp; }
  RankIndex first_rank() const { return dp_rank * rank_count(); }
};

struct PlanRequest {
  ModelGeometry model;
  PlannedSide prefill;
  PlannedSide decode;
  std::uint64_t tokens = 0;
  std::uint64_t prefix = 0;
  Room room = 1;
  bool dense = false;
  CostOptions cost;

  WriteLimits limits() const;
};

/// kInvalid is wrong usage and names every problem. Layouts that are no layout of this model, or do not fit
/// each other, are not: check_request() judges them.
Result<PlanRequest> read_request(const PlanOptions& options);

/// The rules of the handshake, for two daemons whose pools are what their configurations say. Empty, or with
/// warnings only: the two can exchange requests.
std::vector<Violation> check_request(const PlanRequest& request);

}  // namespace kvferry
