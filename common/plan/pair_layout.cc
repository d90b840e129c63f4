#include <algorithm>
#include <limits>
#include <numeric>
#include <optional>

#include "common/base/narrow.h"
#include "common/plan/plan.h"

namespace kvferry {
namespace {

// All addresses and byte counts stay below this, so that signed arithmetic elsewhere cannot overflow either.
constexpr std::uint64_t kPoolBytesMax = (std::uint64_t{1} << 63) - 1;

// Different interleaves cut every period into (a/gcd)*(b/gcd) residue pairs; more than this is a mistake in a
// configuration, not a layout.
constexpr std::uint64_t kResiduePairsMax = 4096;

/// One side with what it owns, and its name for messages.
struct Side {
  std::string_view name;
  const RankShape& shape;
  Ownership own;
};

Result<void> check_side(const ModelGeometry& model, const Side& side) {
  const RankShape& shape = side.shape;
  if (shape.page_size == 0) {
    return fail(Code::kMismatch, "{} page_size is 0, must be at least 1", side.name);
  }
  if (side.own.tokens.count > 1 && shape.page_size % side.own.tokens.interleave != 0) {
    return fail(Code::kMismatch, "{} page_size {} is not a multiple of its DCP interleave {}", side.name,
                shape.page_size, side.own.tokens.interleave);
  }
  const std::vector<BufferKind> kinds = model.buffer_kinds();
  std::vector<std::pair<std::uint32_t, BufferKind>> seen;
  for (std::size_t i = 0; i < shape.buffers.size(); ++i) {
    const BufferShape& buffer = shape.buffers[i];
    if (std::find(kinds.begin(), kinds.end(), buffer.kind) == kinds.end()) {
      return fail(Code::kMismatch,
                  "{} buffer {} (layer {}) is of kind {}, a model with {} attention has no such", side.name,
                  i, buffer.layer, to_string(buffer.kind), to_string(model.attention));
    }
    if (buffer.pages > 0 && buffer.row_bytes > 0 &&
        buffer.pages > kPoolBytesMax / shape.page_size / buffer.row_bytes) {
      return fail(Code::kMismatch,
                  "{} buffer {} (layer {}) has {} pages of {} rows of {} bytes, which is beyond 2^63 bytes",
                  side.name, i, buffer.layer, buffer.pages, shape.page_size, buffer.row_bytes);
    }
    seen.emplace_back(buffer.layer, buffer.kind);
  }
  std::sort(seen.begin(), seen.end());
  const auto twice = std::adjacent_find(seen.begin(), seen.end());
  if (twice != seen.end()) {
    return fail(Code::kMismatch, "{} layer {} has two buffers of kind {}", side.name, twice->first,
                to_string(twice->second));
  }
  return {};
}

/// The buffers of `side`, by (layer, kind); `is_source` says whether layers beyond the model are an error.
Result<void> check_layers(const ModelGeometry& model, const Side& side, bool is_source) {
  const std::vector<std::uint32_t> cached = model.cached_layers();
  for (std::size_t i = 0; i < side.shape.buffers.size(); ++i) {
    const std::uint32_t layer = side.shape.buffers[i].layer;
    if (layer >= model.hidden_layers && !is_source) {
      continue;
    }
    if (!side.own.layers.contains(layer)) {
      return fail(Code::kMismatch, "{} buffer {} holds layer {}, its PP stage {} has layers {} to {}",
                  side.name, i, layer, side.shape.coord.pp, side.own.layers.begin, side.own.layers.end - 1);
    }
    if (!std::binary_search(cached.begin(), cached.end(), layer)) {
      return fail(Code::kMismatch, "{} buffer {} holds layer {}, which owns no KV in model \"{}\"", side.name,
                  i, layer, model.name);
    }
  }
  return {};
}

std::optional<std::uint32_t> find_buffer(const RankShape& shape, std::uint32_t layer, BufferKind kind) {
  const auto found = std::find_if(shape.buffers.begin(), shape.buffers.end(), [&](const BufferShape& buffer) {
    return buffer.layer == layer && buffer.kind == kind;
  });
  if (found == shape.buffers.end()) {
    return std::nullopt;
  }
  return narrow<std::uint32_t>(found - shape.buffers.begin());
}

Result<std::uint32_t> bytes_per_head(const ModelGeometry& model, const Side& side,
                                     const BufferShape& buffer) {
  const std::uint64_t heads = side.own.heads.size();
  if (buffer.row_bytes == 0 || buffer.row_bytes % heads != 0) {
    return fail(Code::kMismatch, "{} layer {} {}: row_bytes {} does not hold {} heads of {} bytes", side.name,
                buffer.layer, to_string(buffer.kind), buffer.row_bytes, heads, model.head_bytes(buffer.kind));
  }
  return narrow<std::uint32_t>(buffer.row_bytes / heads);
}

/// The pair of one (layer, kind) that both ranks own.
Result<BufferPair> pair_buffers(const ModelGeometry& model, const Side& src, const Side& dst,
                                std::uint32_t layer, BufferKind kind) {
  const auto src_index = find_buffer(src.shape, layer, kind);
  const auto dst_index = find_buffer(dst.shape, layer, kind);
  if (!src_index || !dst_index) {
    return fail(Code::kMismatch, "layer {} {}: the {} pool has no such buffer ({} has {} buffers, {} has {})",
                layer, to_string(kind), src_index ? dst.name : src.name, src.name, src.shape.buffers.size(),
                dst.name, dst.shape.buffers.size());
  }
  const BufferShape& from = src.shape.buffers[*src_index];
  const BufferShape& into = dst.shape.buffers[*dst_index];
  KVF_TRY(const std::uint32_t src_head, bytes_per_head(model, src, from));
  KVF_TRY(const std::uint32_t dst_head, bytes_per_head(model, dst, into));
  if (src_head != dst_head || src_head != model.head_bytes(kind)) {
    return fail(
        Code::kMismatch,
        "layer {} {}: bytes per head differ, {} has {} (row_bytes {}), {} has {} (row_bytes {}), the model "
        "has {}; use the same dtype and head_dim",
        layer, to_string(kind), src.name, src_head, from.row_bytes, dst.name, dst_head, into.row_bytes,
        model.head_bytes(kind));
  }
  const Interval common = intersect(src.own.heads, dst.own.heads);
  BufferPair pair;
  pair.src_buffer = *src_index;
  pair.dst_buffer = *dst_index;
  pair.src_row_bytes = from.row_bytes;
  pair.dst_row_bytes = into.row_bytes;
  pair.src_offset = narrow<std::uint32_t>((common.begin - src.own.heads.begin) * src_head);
  pair.dst_offset = narrow<std::uint32_t>((common.begin - dst.own.heads.begin) * src_head);
  pair.bytes = narrow<std::uint32_t>(common.size() * src_head);
  return pair;
}

Result<void> check_coord(std::string_view name, const RankShape& shape) {
  const RankCoord& coord = shape.coord;
  const Topology& topology = shape.topology;
  if (coord.tp >= topology.tp || coord.pp >= topology.pp || coord.cp >= topology.cp ||
      coord.dp >= topology.dp) {
    return fail(Code::kMismatch, "{} rank tp {} pp {} cp {} dp {} is outside its topology {}", name, coord.tp,
                coord.pp, coord.cp, coord.dp, to_string(topology));
  }
  return {};
}

Result<void> check_interleaves(const TokenClass& src, const TokenClass& dst) {
  if (src.count == 1 || dst.count == 1) {
    return {};
  }
  const std::uint32_t common = std::gcd(src.interleave, dst.interleave);
  if (std::uint64_t{src.interleave / common} * (dst.interleave / common) > kResiduePairsMax) {
    return fail(Code::kMismatch, "DCP interleaves {} (prefill) and {} (decode) fit too badly; use equal ones",
                src.interleave, dst.interleave);
  }
  return {};
}

}  // namespace

std::vector<BufferShape> rank_buffers(const ModelGeometry& model, const Topology& topology,
                                      const RankCoord& coord, std::uint64_t pages) {
  const Ownership own = ownership(topology, model, coord);
  const std::vector<std::uint32_t> layers = model.cached_layers();
  std::vector<BufferShape> buffers;
  for (const BufferKind kind : model.buffer_kinds()) {
    const auto row_bytes = narrow<std::uint32_t>(own.heads.size() * model.head_bytes(kind));
    for (const std::uint32_t layer : layers) {
      if (own.layers.contains(layer)) {
        buffers.push_back({layer, kind, row_bytes, pages});
      }
    }
  }
  return buffers;
}

Result<PairLayout> pair_layout(const ModelGeometry& model, const RankShape& src, const RankShape& dst) {
  KVF_TRY_VOID(validate_pair(model, src.topology, dst.topology));
  KVF_TRY_VOID(check_coord("prefill", src));
  KVF_TRY_VOID(check_coord("decode", dst));
  const Side from{"prefill", src, ownership(src.topology, model, src.coord)};
  const Side into{"decode", dst, ownership(dst.topology, model, dst.coord)};
  KVF_TRY_VOID(check_side(model, from));
  KVF_TRY_VOID(check_side(model, into));
  KVF_TRY_VOID(check_layers(model, from, true));
  KVF_TRY_VOID(check_layers(model, into, false));
  KVF_TRY_VOID(check_interleaves(from.own.tokens, into.own.tokens));

  PairLayout layout;
  layout.src_tokens = from.own.tokens;
  layout.dst_tokens = into.own.tokens;
  layout.src_cp = {src.topology.cp_split, src.topology.cp, src.coord.cp};
  layout.src_page_size = src.page_size;
  layout.dst_page_size = dst.page_size;
  const RankPairing pairing = rank_pairing(model, src.topology, src.coord, dst.topology, dst.coord);
  layout.replica = pairing.replica;
  layout.replicas = pairing.replicas;
  const Interval heads = intersect(from.own.heads, into.own.heads);
  if (!pairing.target || heads.size() == 0) {
    return layout;
  }
  const Interval layers = intersect(from.own.layers, into.own.layers);
  layout.src_pages = layout.dst_pages = std::numeric_limits<std::uint64_t>::max();
  for (const BufferKind kind : model.buffer_kinds()) {
    for (const std::uint32_t layer : model.cached_layers()) {
      if (layers.contains(layer)) {
        KVF_TRY(const BufferPair pair, pair_buffers(model, from, into, layer, kind));
        layout.src_pages = std::min(layout.src_pages, src.buffers[pair.src_buffer].pages);
        layout.dst_pages = std::min(layout.dst_pages, dst.buffers[pair.dst_buffer].pages);
        layout.pairs.push_back(pair);
      }
    }
  }
  if (layout.pairs.empty()) {
    layout.src_pages = layout.dst_pages = 0;
  }
  return layout;
}

}  // namespace kvferry
