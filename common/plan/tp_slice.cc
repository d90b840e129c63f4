#include "common/plan/tp_slice.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

namespace kvferry {
namespace {

constexpr std::int64_t kSizeMax = std::int64_t{1} << 31;

Result<void> check_fields(const TpSliceRequest& request) {
  const std::array<std::pair<std::string_view, std::int64_t>, 6> sizes{{
      {"src_tp_size", request.src_tp_size},
      {"dst_tp_size", request.dst_tp_size},
      {"total_kv_heads", request.total_kv_heads},
      {"src_item_len", request.src_item_len},
      {"dst_item_len", request.dst_item_len},
      {"page_size", request.page_size},
  }};
  for (const auto& [field, value] : sizes) {
    if (value < 1 || value > kSizeMax) {
      return fail(Code::kInvalid, "{} is {}, must be 1 to {}", field, value, kSizeMax);
    }
  }
  if (request.src_tp_rank < 0 || request.dst_tp_rank < 0) {
    return fail(Code::kInvalid, "src_tp_rank {} and dst_tp_rank {} must not be negative", request.src_tp_rank,
                request.dst_tp_rank);
  }
  if (request.src_item_len % request.page_size != 0 || request.dst_item_len % request.page_size != 0) {
    return fail(Code::kInvalid,
                "item lengths {} (source) and {} (destination) must be multiples of page_size {}",
                request.src_item_len, request.dst_item_len, request.page_size);
  }
  return {};
}

Result<void> check_heads(const TpSliceRequest& request) {
  const std::int64_t total = request.total_kv_heads;
  for (const auto& [side, tp] :
       {std::pair{"prefill", request.src_tp_size}, std::pair{"decode", request.dst_tp_size}}) {
    if (total % tp != 0 && tp % total != 0) {
      return fail(Code::kInvalid, "{} KV heads neither divide nor replicate over {} TP {}; change tp", total,
                  side, tp);
    }
  }
  const auto [low, high] = std::minmax(request.src_tp_size, request.dst_tp_size);
  if (high % low != 0) {
    return fail(Code::kInvalid, "attention TP {} (prefill) and {} (decode) are not multiples of each other",
                request.src_tp_size, request.dst_tp_size);
  }
  return {};
}

}  // namespace

Result<TpSliceConfig> build_tp_slice_config(const TpSliceRequest& request) {
  KVF_TRY_VOID(check_fields(request));
  KVF_TRY_VOID(check_heads(request));
  const std::int64_t total = request.total_kv_heads;
  const std::int64_t src_heads = std::max<std::int64_t>(1, total / request.src_tp_size);
  const std::int64_t dst_heads = std::max<std::int64_t>(1, total / request.dst_tp_size);
  const std::int64_t src_replicas = std::max<std::int64_t>(1, request.src_tp_size / total);
  const std::int64_t dst_replicas = std::max<std::int64_t>(1, request.dst_tp_size / total);
  const std::int64_t src_rank = request.src_tp_rank % request.src_tp_size;
  const std::int64_t dst_rank = request.dst_tp_rank % request.dst_tp_size;

  TpSliceConfig config;
  if (request.src_tp_size > request.dst_tp_size) {
    config.heads = src_heads;
    config.dst_head_start = src_rank / src_replicas * src_heads % dst_heads;
  } else {
    config.heads = dst_heads;
    config.src_head_start = dst_rank / dst_replicas * dst_heads % src_heads;
  }
  config.src_token_bytes = request.src_item_len / request.page_size;
  config.dst_token_bytes = request.dst_item_len / request.page_size;
  config.bytes_per_head = config.dst_token_bytes / dst_heads;
  const std::int64_t src_bytes_per_head = config.src_token_bytes / src_heads;
  if (config.bytes_per_head == 0 || src_bytes_per_head == 0) {
    return fail(Code::kInvalid,
                "Head slice size evaluates to zero: {} bytes per source token hold {} heads, {} bytes per "
                "destination token hold {}; check total_kv_heads and the item lengths",
                config.src_token_bytes, src_heads, config.dst_token_bytes, dst_heads);
  }
  // Judged with the source's own bytes per head: with the destination's, the slice fits by construction and a
  // dtype or head_dim mismatch would pass unseen.
  const std::int64_t slice_end = (config.dst_head_start + config.heads) * src_bytes_per_head;
  if (slice_end > config.dst_token_bytes) {
    return fail(
        Code::kMismatch,
        "Slice size exceeds destination token capacity for TP slice transfer: heads {} to {} of {} bytes "
        "end at byte {}, the destination token has {}; use the same dtype and head_dim on both sides",
        config.dst_head_start, config.dst_head_start + config.heads - 1, src_bytes_per_head, slice_end,
        config.dst_token_bytes);
  }
  if (src_bytes_per_head != config.bytes_per_head || config.src_token_bytes % src_heads != 0 ||
      config.dst_token_bytes % dst_heads != 0) {
    return fail(
        Code::kMismatch,
        "bytes per head differ: the source token has {} bytes for {} heads, the destination token {} bytes "
        "for {} heads; use the same dtype and head_dim on both sides",
        config.src_token_bytes, src_heads, config.dst_token_bytes, dst_heads);
  }
  config.src_offset = config.src_head_start * config.bytes_per_head;
  config.dst_offset = config.dst_head_start * config.bytes_per_head;
  config.slice_bytes = config.heads * config.bytes_per_head;
  return config;
}

SliceAddress slice_address(const TpSliceConfig& config, const TpSliceRequest& request, std::int64_t src_page,
                           std::int64_t dst_page, std::int64_t token) {
  return {src_page * request.src_item_len + token * config.src_token_bytes + config.src_offset,
          dst_page * request.dst_item_len + token * config.dst_token_bytes + config.dst_offset};
}

}  // namespace kvferry
