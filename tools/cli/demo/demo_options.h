#pragma once
// What `kvferry demo` was asked for, and the layouts that follow from it.

#include <cstdint>
#include <string>

#include "common/base/result.h"
#include "common/model/geometry.h"
#include "common/topology/topology.h"
#include "tools/cli/layout_options.h"

namespace kvferry {

enum class Side : unsigned char { kPrefill = 0, kDecode = 1 };
std::string_view side_name(Side side);
inline Side other(Side side) {
  return side == Side::kPrefill ? Side::kDecode : Side::kPrefill;
}

struct DemoOptions : LayoutOptions {
  std::string fabric = "shm";
  std::string trace;  // empty: generated
  std::uint64_t requests = 40;
  std::uint64_t seed = 1;
  std::uint32_t concurrency = 4;
  std::uint64_t chunk_tokens = 8192;
  std::uint32_t layer_group = 0;  // layers that prefill hands over at once; 0: all
  double memory_gib = 0;          // 0: 65 % of what is available
  std::uint32_t timeout_s = 120;
  std::string host = "127.0.0.1";  // what the daemons listen on
  bool auth = true;                // the daemons share a key
  std::string verify;              // off, sampled or full; empty: the daemon's default
  std::string model_text;          // a config.json that stands in for `model`; empty: none
  std::uint32_t copy_threads = 0;  // of shm; 0: the daemon's default
  bool dense = false;
  bool corrupt = false;
  bool keep = false;
  bool hold = false;
  std::string kill;  // "prefill" or "decode"
  std::uint64_t kill_after = 3;
  std::uint64_t abort_storm = 0;  // rooms to abort in the middle of their transfer; 0: replay a trace
};

/// Both sides' layouts, checked.
struct DemoLayout {
  ModelGeometry model;
  Topology prefill;
  Topology decode;
  std::uint32_t prefill_page_size = 64;
  std::uint32_t decode_page_size = 64;
  std::uint32_t rooms = 1;  // window pages and state slots of each rank are for so many

  std::uint32_t page_size(Side side) const {
    return side == Side::kPrefill ? prefill_page_size : decode_page_size;
  }
  const Topology& topology(Side side) const { return side == Side::kPrefill ? prefill : decode; }
  /// Tokens of one page of a side, all DCP ranks together.
  std::uint64_t virtual_page(Side side) const { return std::uint64_t{page_size(side)} * topology(side).dcp; }
  /// A multiple of both virtual pages: prefixes and chunks are multiples of it.
  std::uint64_t unit_tokens() const;
  std::uint64_t pages_for(Side side, std::uint64_t fresh_tokens) const;
};
Result<DemoLayout> demo_layout(const DemoOptions& options);

/// Pools of every rank of both sides, for `tokens` tokens in flight (per DP group).
struct PoolSizes {
  std::uint64_t tokens = 0;
  std::uint32_t prefill_pages = 0;
  std::uint32_t decode_pages = 0;
  std::uint64_t bytes = 0;
  std::uint32_t pages(Side side) const { return side == Side::kPrefill ? prefill_pages : decode_pages; }
};
/// As many tokens as `wanted_tokens`, or as fit into `budget` bytes where that is less.
Result<PoolSizes> pool_sizes(const DemoLayout& layout, std::uint64_t wanted_tokens, std::uint64_t budget);

}  // namespace kvferry
