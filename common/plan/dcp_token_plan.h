#pragma once
// The published DCP token-transfer plan (pd-spec 7.2, 7.3): prefill DCP 1 -> decode DCP N, token by token.
// Kept by name and meaning for people who look for it and as an independent check of the planner, which
// covers the same ground with runs. Error texts keep the published key phrases and add both values and the
// fix.

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "common/base/result.h"

namespace kvferry {

struct DcpTokenPlanRequest {
  std::span<const std::uint32_t> src_pages;  // this chunk's physical source pages
  std::span<const std::uint32_t> dst_pages;  // the whole request's virtual page list, never sliced
  std::int64_t page_size = 0;                // physical, tokens
  std::int64_t dcp_size = 0;
  std::int64_t dcp_rank = 0;
  std::int64_t src_page_offset = 0;  // pages of the send range before this chunk
  std::int64_t decode_prefix_len = 0;
  std::optional<std::int64_t> num_kv_tokens;  // default: src_pages.size() * page_size
};

struct DcpTokenPlan {
  std::vector<std::int64_t> src_rows;
  std::vector<std::int64_t> dst_rows;
};

/// Errors: prefix not aligned to the virtual page, num_kv_tokens outside the source pages, insufficient
/// destination pages (required/provided), in that order; also sizes < 1 and rank out of range.
Result<DcpTokenPlan> build_dcp_token_transfer_plan(const DcpTokenPlanRequest& request);

/// The plan of replicated draft entries beside it (7.3): every rank gets every token.
Result<DcpTokenPlan> build_dcp_draft_transfer_plan(const DcpTokenPlanRequest& request);

}  // namespace kvferry
