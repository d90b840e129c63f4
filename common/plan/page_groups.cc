#include "common/plan/page_groups.h"

namespace kvferry {

Result<std::vector<PageGroup>> group_concurrent_contiguous(std::span<const std::uint32_t> src_pages,
                                                           std::span<const std::uint32_t> dst_pages) {
  std::vector<PageGroup> groups;
  if (src_pages.empty() || dst_pages.empty()) {
    return groups;
  }
  if (src_pages.size() != dst_pages.size()) {
    return fail(
        Code::kInvalid,
        "page lists differ in length: {} source pages, {} destination pages; pass the pages of the same "
        "tokens",
        src_pages.size(), dst_pages.size());
  }
  for (std::size_t i = 0; i < src_pages.size(); ++i) {
    if (!groups.empty()) {
      PageGroup& last = groups.back();
      if (src_pages[i] == last.src_page + last.count && dst_pages[i] == last.dst_page + last.count) {
        ++last.count;
        continue;
      }
    }
    groups.push_back({src_pages[i], dst_pages[i], 1});
  }
  return groups;
}

}  // namespace kvferry
