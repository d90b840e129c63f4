#include "tools/cli/demo/demo_options.h"

#include <algorithm>
#include <numeric>

#include "common/base/narrow.h"
#include "common/plan/plan.h"

namespace kvferry {

std::string_view side_name(Side side) {
  return side == Side::kPrefill ? "prefill" : "decode";
}

std::uint64_t DemoLayout::unit_tokens() const {
  return std::lcm(virtual_page(Side::kPrefill), virtual_page(Side::kDecode));
}

std::uint64_t DemoLayout::pages_for(Side side, std::uint64_t fresh_tokens) const {
  return (fresh_tokens + virtual_page(side) - 1) / virtual_page(side);
}

Result<DemoLayout> demo_layout(const DemoOptions& options) {
  DemoLayout layout;
  layout.prefill_page_size = options.page_size;
  layout.decode_page_size = options.decode_page_size != 0 ? options.decode_page_size : options.page_size;
  // Rooms that a kill has ended may rest while the next ones run.
  layout.rooms = 2 * options.concurrency + 4;
  KVF_TRY(layout.model, options.model_text.empty() ? load_geometry(options.model)
                                                   : geometry_from_hf_config(options.model_text));
  layout.model.draft_layers = options.draft_layers;
  if (!options.dtype.empty()) {
    KVF_TRY(layout.model.dtype, parse_dtype(options.dtype));
  }
  KVF_TRY(layout.prefill, parse_topology(options.prefill));
  KVF_TRY(layout.decode, parse_topology(options.decode_layout(layout.model)));
  for (const Side side : {Side::kPrefill, Side::kDecode}) {
    const auto valid = validate(layout.topology(side), layout.model);
    if (!valid) {
      return fail(Code::kInvalid, "--{} {}: {}", side_name(side), to_string(layout.topology(side)),
                  valid.error().message);
    }
  }
  return layout;
}

namespace {

/// Bytes of one page on every rank of a side, and of what does not grow with the pages.
struct SideBytes {
  std::uint64_t page = 0;
  std::uint64_t fixed = 0;
};

SideBytes side_bytes(const DemoLayout& layout, Side side) {
  const Topology& topology = layout.topology(side);
  const std::uint32_t draft_rows = rows_of_page(RowSpace::kDraft, layout.page_size(side), topology);
  const std::uint64_t window_pages =
      (layout.model.sliding_window / layout.virtual_page(side) + 2) * layout.rooms;
  SideBytes bytes;
  for (RankIndex rank = 0; rank < topology.rank_count(); ++rank) {
    for (const BufferShape& shape :
         rank_buffers(layout.model, topology, topology.coord(rank), 1, draft_rows)) {
      const std::uint64_t page = std::uint64_t{shape.row_bytes} * shape.rows_of_page(layout.page_size(side));
      const RowSpace space = layout.model.row_space(shape.id());
      if (space == RowSpace::kTokens || space == RowSpace::kDraft) {
        bytes.page += page;
      } else {
        bytes.fixed += page * (space == RowSpace::kState ? layout.rooms : window_pages);
      }
    }
  }
  return bytes;
}

}  // namespace

Result<PoolSizes> pool_sizes(const DemoLayout& layout, std::uint64_t wanted_tokens, std::uint64_t budget) {
  const std::uint64_t unit = layout.unit_tokens();
  const std::uint64_t prefill_pages = unit / layout.virtual_page(Side::kPrefill);
  const std::uint64_t decode_pages = unit / layout.virtual_page(Side::kDecode);
  const SideBytes prefill = side_bytes(layout, Side::kPrefill);
  const SideBytes decode = side_bytes(layout, Side::kDecode);
  const std::uint64_t unit_bytes = prefill_pages * prefill.page + decode_pages * decode.page;
  const std::uint64_t fixed = prefill.fixed + decode.fixed;
  if (unit_bytes == 0 || budget < unit_bytes + fixed) {
    return fail(
        Code::kExhausted,
        "one page on every rank of both sides needs {} bytes, and the pools may have {}; give more with "
        "--memory, or choose a smaller --model or fewer ranks",
        unit_bytes + fixed, budget);
  }
  constexpr std::uint64_t kPagesMax = 1u << 30;
  const std::uint64_t units =
      std::min({(wanted_tokens + unit - 1) / unit, (budget - fixed) / unit_bytes, kPagesMax / unit});
  PoolSizes sizes;
  sizes.tokens = units * unit;
  sizes.prefill_pages = narrow<std::uint32_t>(units * prefill_pages);
  sizes.decode_pages = narrow<std::uint32_t>(units * decode_pages);
  sizes.bytes = units * unit_bytes + fixed;
  return sizes;
}

}  // namespace kvferry
