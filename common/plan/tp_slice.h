#pragma once
// The published TP slice config for head-sharded KV under unequal TP (pd-spec 8.1, with dst_rep: the map that
// is right for prefill TP < heads < decode TP). Kept by name and meaning; the planner gets the same answer
// from head intervals.

#include <cstdint>

#include "common/base/result.h"

namespace kvferry {

struct TpSliceRequest {
  std::int64_t src_tp_size = 0;
  std::int64_t dst_tp_size = 0;
  std::int64_t src_tp_rank = 0;
  std::int64_t dst_tp_rank = 0;
  std::int64_t total_kv_heads = 0;
  std::int64_t src_item_len = 0;  // bytes of one source page of one buffer
  std::int64_t dst_item_len = 0;
  std::int64_t page_size = 0;
};

struct TpSliceConfig {
  std::int64_t src_head_start = 0;
  std::int64_t heads = 0;
  std::int64_t dst_head_start = 0;
  std::int64_t bytes_per_head = 0;
  std::int64_t src_token_bytes = 0;
  std::int64_t dst_token_bytes = 0;
  std::int64_t src_offset = 0;  // bytes into the source token
  std::int64_t dst_offset = 0;
  std::int64_t slice_bytes = 0;
};

/// Errors (kInvalid/kMismatch): "Head slice size evaluates to zero", "Slice size exceeds destination token
/// capacity", heads that neither divide nor replicate, source and destination bytes per head that differ.
Result<TpSliceConfig> build_tp_slice_config(const TpSliceRequest& request);

/// Byte addresses of one token's slice relative to the buffers' bases (pd-spec 8.2).
struct SliceAddress {
  std::int64_t src = 0;
  std::int64_t dst = 0;
};
SliceAddress slice_address(const TpSliceConfig& config, const TpSliceRequest& request, std::int64_t src_page,
                           std::int64_t dst_page, std::int64_t token);

}  // namespace kvferry
