#include "common/plan/dcp_token_plan.h"

namespace kvferry {
namespace {

// Positions beyond this are nobody's request; below it no sum or product of this file overflows.
constexpr std::int64_t kTokenMax = std::int64_t{1} << 48;
constexpr std::int64_t kSizeMax = std::int64_t{1} << 30;

struct Checked {
  std::int64_t virtual_page = 0;
  std::int64_t tokens = 0;       // num_kv_tokens, resolved
  std::int64_t send_offset = 0;  // tokens of the send range before this chunk
};

Result<void> check_range(std::string_view field, std::int64_t value, std::int64_t low, std::int64_t high) {
  if (value < low || value > high) {
    return fail(Code::kInvalid, "{} is {}, must be {} to {}", field, value, low, high);
  }
  return {};
}

Result<Checked> check(const DcpTokenPlanRequest& request) {
  KVF_TRY_VOID(check_range("page_size", request.page_size, 1, kSizeMax));
  KVF_TRY_VOID(check_range("dcp_size", request.dcp_size, 1, kSizeMax / request.page_size));
  KVF_TRY_VOID(check_range("dcp_rank", request.dcp_rank, 0, request.dcp_size - 1));
  KVF_TRY_VOID(check_range("src_page_offset", request.src_page_offset, 0, kTokenMax / request.page_size));
  KVF_TRY_VOID(check_range("decode_prefix_len", request.decode_prefix_len, 0, kTokenMax));
  Checked out;
  out.virtual_page = request.page_size * request.dcp_size;
  out.send_offset = request.src_page_offset * request.page_size;
  if (request.decode_prefix_len % out.virtual_page != 0) {
    return fail(
        Code::kInvalid,
        "PD DCP transfer requires decode_prefix_len to align to the virtual DCP page size ({}), got {}; "
        "round the prefix down to a multiple of page_size * dcp_size",
        out.virtual_page, request.decode_prefix_len);
  }
  if (request.src_pages.size() > static_cast<std::size_t>(kTokenMax / request.page_size)) {
    return fail(Code::kInvalid, "{} source pages of {} tokens are beyond 2^48 tokens",
                request.src_pages.size(), request.page_size);
  }
  const std::int64_t capacity = static_cast<std::int64_t>(request.src_pages.size()) * request.page_size;
  out.tokens = request.num_kv_tokens.value_or(capacity);
  if (out.tokens < 0 || out.tokens > capacity) {
    return fail(
        Code::kInvalid,
        "num_kv_tokens must fit in the provided source pages, got tokens={}, capacity={} ({} pages of {}); "
        "pass the token count of this chunk, not of the request",
        out.tokens, capacity, request.src_pages.size(), request.page_size);
  }
  return out;
}

Result<void> check_destination(const DcpTokenPlanRequest& request, std::int64_t last_page) {
  if (last_page >= static_cast<std::int64_t>(request.dst_pages.size())) {
    return fail(
        Code::kInvalid,
        "Insufficient destination DCP pages: required={}, provided={} (DCP rank {} of {}, page_size {}); "
        "pass the whole request's page list, never a slice",
        last_page + 1, request.dst_pages.size(), request.dcp_rank, request.dcp_size, request.page_size);
  }
  return {};
}

/// Row `position` of a list of pages of `page_size` rows.
std::int64_t row_of(std::span<const std::uint32_t> pages, std::int64_t position, std::int64_t page_size) {
  return std::int64_t{pages[static_cast<std::size_t>(position / page_size)]} * page_size +
         position % page_size;
}

}  // namespace

Result<DcpTokenPlan> build_dcp_token_transfer_plan(const DcpTokenPlanRequest& request) {
  KVF_TRY(const Checked checked, check(request));
  DcpTokenPlan plan;
  const std::int64_t chunk_start = request.decode_prefix_len + checked.send_offset;
  const std::int64_t skew = (request.dcp_rank - chunk_start) % request.dcp_size;
  const std::int64_t first = skew < 0 ? skew + request.dcp_size : skew;
  if (first >= checked.tokens) {
    return plan;
  }
  const std::int64_t count = (checked.tokens - first - 1) / request.dcp_size + 1;
  const std::int64_t last = first + (count - 1) * request.dcp_size;
  KVF_TRY_VOID(
      check_destination(request, (checked.send_offset + last) / request.dcp_size / request.page_size));
  plan.src_rows.reserve(static_cast<std::size_t>(count));
  plan.dst_rows.reserve(static_cast<std::size_t>(count));
  for (std::int64_t offset = first; offset < checked.tokens; offset += request.dcp_size) {
    const std::int64_t local = (checked.send_offset + offset) / request.dcp_size;
    plan.src_rows.push_back(row_of(request.src_pages, offset, request.page_size));
    plan.dst_rows.push_back(row_of(request.dst_pages, local, request.page_size));
  }
  return plan;
}

Result<DcpTokenPlan> build_dcp_draft_transfer_plan(const DcpTokenPlanRequest& request) {
  KVF_TRY(const Checked checked, check(request));
  DcpTokenPlan plan;
  if (checked.tokens == 0) {
    return plan;
  }
  KVF_TRY_VOID(check_destination(request, (checked.send_offset + checked.tokens - 1) / checked.virtual_page));
  plan.src_rows.reserve(static_cast<std::size_t>(checked.tokens));
  plan.dst_rows.reserve(static_cast<std::size_t>(checked.tokens));
  for (std::int64_t offset = 0; offset < checked.tokens; ++offset) {
    plan.src_rows.push_back(row_of(request.src_pages, offset, request.page_size));
    plan.dst_rows.push_back(row_of(request.dst_pages, checked.send_offset + offset, checked.virtual_page));
  }
  return plan;
}

}  // namespace kvferry
