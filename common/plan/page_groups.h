#pragma once
// Contiguous grouping of page lists (pd-spec 6.1, published as group_concurrent_contiguous).

#include <cstdint>
#include <span>
#include <vector>

#include "common/base/result.h"

namespace kvferry {

struct PageGroup {
  std::uint64_t src_page = 0;
  std::uint64_t dst_page = 0;
  std::uint64_t count = 0;
  friend bool operator==(const PageGroup&, const PageGroup&) = default;
};

/// Breaks where either list stops being consecutive. Either list empty: no groups. Different lengths
/// otherwise: kInvalid with both lengths.
Result<std::vector<PageGroup>> group_concurrent_contiguous(std::span<const std::uint32_t> src_pages,
                                                           std::span<const std::uint32_t> dst_pages);

}  // namespace kvferry
