#pragma once
// What `kvferry plan` was asked for, as typed.

#include <cstdint>
#include <optional>
#include <string>

#include "common/base/ids.h"
#include "tools/cli/layout_options.h"
#include "transport/block_cutter.h"
#include "transport/ucx/put_limits.h"

namespace kvferry {

inline constexpr std::uint64_t kPlanTokensMax = 1u << 24;  // keeps the page lists and the runs in memory
inline constexpr std::uint32_t kPlanRanksMax = 1024;       // of one DP rank of one side

/// How the writes of a plan are counted and timed. Writes are what the fabric posts: copies of contiguous
/// pieces (shm), blocks (tcp), or puts over RDMA with blocks for what puts cannot write (ucx).
struct CostOptions {
  std::string fabric = "ucx";  // whose writes count for the time
  double gigabytes_per_second = 10;
  double write_us = 0.25;
  CutLimits blocks;
  std::uint64_t staging_bytes = 2u << 20;  // of one source rank
};

struct PlanOptions : LayoutOptions {
  std::uint32_t prefill_dp = 0;
  std::uint32_t decode_dp = 0;
  std::uint32_t prefill_page_size = 0;  // 0: page_size
  std::uint64_t tokens = 65536;
  std::uint64_t prefix = 0;
  Room room = 1;
  std::optional<std::uint64_t> decode_pages;  // given to every decode rank; default: as many as needed
  bool dense = false;
  CostOptions cost;
  std::optional<std::uint64_t> explain;  // a token
  bool pages = false;
  std::uint64_t limit = 32;  // lines of a list; 0 = all
  bool json = false;
};

}  // namespace kvferry
