#include <algorithm>
#include <array>
#include <limits>
#include <numeric>

#include "common/plan/buffer_pairs.h"
#include "common/plan/plan.h"

namespace kvferry {
namespace {

// Different interleaves cut every period into (a/gcd)*(b/gcd) residue pairs; more than this is a mistake in a
// configuration, not a layout.
constexpr std::uint64_t kResiduePairsMax = 4096;

Result<void> check_page_rows(const ModelGeometry& model, const Side& side, std::size_t index) {
  const RankShape& shape = side.shape;
  const BufferShape& buffer = shape.buffers[index];
  const std::uint32_t rows = rows_of_page(model.row_space(buffer.id()), shape.page_size, shape.topology);
  if (model.has_buffer(buffer.id()) && buffer.rows_of_page(shape.page_size) != rows) {
    return fail(Code::kMismatch, "{} buffer {} (layer {} {}) has {} rows in a page, its {} pages have {}",
                side.name, index, buffer.layer, to_string(buffer.kind), buffer.rows_of_page(shape.page_size),
                to_string(model.row_space(buffer.id())), rows);
  }
  std::uint64_t all = 0;
  if (buffer.pages > 0 && buffer.row_bytes > 0 && !buffer_rows(buffer, shape.page_size, all)) {
    return fail(
        Code::kMismatch,
        "{} buffer {} (layer {}) has {} pages of {} rows of {} bytes, {} rows apart, which overlap or are "
        "beyond 2^63 bytes",
        side.name, index, buffer.layer, buffer.pages, buffer.rows_of_page(shape.page_size), buffer.row_bytes,
        buffer.pitch_of(shape.page_size));
  }
  return {};
}

Result<void> check_side(const ModelGeometry& model, const Side& side) {
  const RankShape& shape = side.shape;
  if (shape.page_size == 0) {
    return fail(Code::kMismatch, "{} page_size is 0, must be at least 1", side.name);
  }
  if (side.own.tokens.count > 1 && shape.page_size % side.own.tokens.interleave != 0) {
    return fail(Code::kMismatch, "{} page_size {} is not a multiple of its DCP interleave {}", side.name,
                shape.page_size, side.own.tokens.interleave);
  }
  std::vector<BufferId> seen;
  for (std::size_t i = 0; i < shape.buffers.size(); ++i) {
    KVF_TRY_VOID(check_page_rows(model, side, i));
    seen.push_back(shape.buffers[i].id());
  }
  std::sort(seen.begin(), seen.end());
  const auto twice = std::adjacent_find(seen.begin(), seen.end());
  if (twice != seen.end()) {
    return fail(Code::kMismatch, "{} layer {} has two buffers of kind {}", side.name, twice->layer,
                to_string(twice->kind));
  }
  return {};
}

/// Every buffer belongs to the model and to the rank's stage; `is_source` says whether layers beyond the
/// draft model are an error.
Result<void> check_layers(const ModelGeometry& model, const Side& side, bool is_source) {
  const std::uint32_t known = model.hidden_layers + model.draft_layers;
  for (std::size_t i = 0; i < side.shape.buffers.size(); ++i) {
    const BufferShape& buffer = side.shape.buffers[i];
    if (buffer.layer >= known && !is_source) {
      continue;
    }
    if (!side.own.has_layer(model, buffer.layer)) {
      return fail(Code::kMismatch, "{} buffer {} holds layer {}, its PP stage {} has layers {} to {}",
                  side.name, i, buffer.layer, side.shape.coord.pp, side.own.layers.begin,
                  side.own.layers.end - 1);
    }
    if (!model.has_buffer(buffer.id())) {
      return fail(Code::kMismatch,
                  "{} buffer {} (layer {}) is of kind {}, which model \"{}\" ({}) does not have there",
                  side.name, i, buffer.layer, to_string(buffer.kind), model.name, to_string(model.attention));
    }
  }
  return {};
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

/// What the parts of one pair of ranks have in common, and the parts made so far.
class Parts {
 public:
  Parts(const ModelGeometry& model, const Side& from, const Side& into)
      : model_(model), from_(from), into_(into) {
    for (const RowSpace space : pairing_spaces(model)) {
      pairings_[static_cast<std::size_t>(space)] = rank_pairing(model, from.shape.topology, from.shape.coord,
                                                                into.shape.topology, into.shape.coord, space);
    }
    parts_.push_back(empty_part(RowSpace::kTokens));
    parts_.front().src_page_size = parts_.front().src_pitch = from.shape.page_size;
    parts_.front().dst_page_size = parts_.front().dst_pitch = into.shape.page_size;
  }

  /// Whether the one ever sends the other anything.
  bool any() const {
    return std::any_of(pairings_.begin(), pairings_.end(),
                       [](const RankPairing& pairing) { return pairing.ever_sends(); });
  }

  /// Adds the pairs of one buffer that both sides own.
  Result<void> add(const BufferId& id) {
    const RowSpace space = model_.row_space(id);
    if (!pairing(space).ever_sends()) {
      return {};
    }
    PairLayout shape = empty_part(space);
    const auto src = find_buffer(from_.shape, id);
    const auto dst = find_buffer(into_.shape, id);
    if (space == RowSpace::kDraft && (!src || !dst)) {
      return {};  // a draft model on one side only
    }
    if (!src || !dst) {
      return fail(Code::kMismatch,
                  "layer {} {}: the {} pool has no such buffer ({} has {} buffers, {} has {})", id.layer,
                  to_string(id.kind), src ? into_.name : from_.name, from_.name, from_.shape.buffers.size(),
                  into_.name, into_.shape.buffers.size());
    }
    const BufferShape& source = from_.shape.buffers[*src];
    const BufferShape& destination = into_.shape.buffers[*dst];
    shape.src_page_size = source.rows_of_page(from_.shape.page_size);
    shape.dst_page_size = destination.rows_of_page(into_.shape.page_size);
    shape.src_pitch = source.pitch_of(from_.shape.page_size);
    shape.dst_pitch = destination.pitch_of(into_.shape.page_size);
    PairLayout& part = part_like(shape);
    KVF_TRY_VOID(append_pairs(model_, from_, *src, into_, *dst, part.pairs));
    part.src_pages = std::min(part.src_pages, source.pages);
    part.dst_pages = std::min(part.dst_pages, destination.pages);
    return {};
  }

  std::vector<PairLayout> take() {
    for (PairLayout& part : parts_) {
      if (part.pairs.empty()) {
        part.src_pages = part.dst_pages = 0;
      }
    }
    return std::move(parts_);
  }

 private:
  // Windows pair as the tokens do.
  const RankPairing& pairing(RowSpace space) const {
    return pairings_[static_cast<std::size_t>(space == RowSpace::kWindow ? RowSpace::kTokens : space)];
  }

  PairLayout empty_part(RowSpace space) const {
    PairLayout part;
    part.space = space;
    if (space != RowSpace::kState) {
      part.src_cp = {from_.shape.topology.cp_split, from_.shape.topology.cp, from_.shape.coord.cp};
    }
    if (space == RowSpace::kTokens || space == RowSpace::kWindow) {
      part.src_tokens = from_.own.tokens;
      part.dst_tokens = into_.own.tokens;
    }
    part.replica = pairing(space).replica;
    part.replicas = pairing(space).replicas;
    part.src_pages = part.dst_pages = std::numeric_limits<std::uint64_t>::max();
    return part;
  }

  PairLayout& part_like(const PairLayout& shape) {
    for (PairLayout& part : parts_) {
      if (part.space == shape.space && part.src_page_size == shape.src_page_size &&
          part.dst_page_size == shape.dst_page_size && part.src_pitch == shape.src_pitch &&
          part.dst_pitch == shape.dst_pitch) {
        return part;
      }
    }
    return parts_.emplace_back(shape);
  }

  const ModelGeometry& model_;
  const Side& from_;
  const Side& into_;
  std::vector<PairLayout> parts_;
  std::array<RankPairing, kRowSpaces> pairings_{};
};

}  // namespace

Result<std::vector<PairLayout>> pair_layouts(const ModelGeometry& model, const RankShape& src,
                                             const RankShape& dst) {
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

  Parts parts(model, from, into);
  if (!parts.any()) {
    return parts.take();
  }
  const Interval layers = intersect(from.own.layers, into.own.layers);
  for (const BufferId& id : model.pool_buffers(true)) {
    if (id.layer >= model.hidden_layers || layers.contains(id.layer)) {
      KVF_TRY_VOID(parts.add(id));
    }
  }
  return parts.take();
}

Result<PairLayout> pair_layout(const ModelGeometry& model, const RankShape& src, const RankShape& dst) {
  KVF_TRY(std::vector<PairLayout> parts, pair_layouts(model, src, dst));
  return std::move(parts.front());
}

}  // namespace kvferry
