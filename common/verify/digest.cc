#include "common/verify/digest.h"

#include <algorithm>
#include <bit>

#include "common/base/hash.h"

namespace kvferry {
namespace {

constexpr std::uint64_t kColumnsWanted = 1024;
constexpr std::uint32_t kRangeMin = 64;

std::uint64_t mix(std::uint64_t value) {
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
  return value ^ (value >> 31);
}

/// Hash of a coordinate's fixed part; the token is mixed in per row.
std::uint64_t lane_key(std::uint32_t layer, BufferKind kind, std::uint64_t lane) {
  return mix(mix((std::uint64_t{layer} << 8 | static_cast<std::uint64_t>(kind)) + 0x9E3779B97F4A7C15ull) +
             lane);
}

std::uint64_t unit_hash(std::span<const std::byte> bytes, std::uint64_t key) {
  return mix(hash_bytes(bytes) + key);
}

std::uint64_t token_key(std::uint64_t lane, std::uint64_t token) {
  return mix(lane + token * 0xD1342543DE82EF95ull);
}

/// The rows of one buffer of the task's rank.
class BufferReader {
 public:
  BufferReader(const DigestTask& task, std::uint32_t buffer)
      : place_(task.pool->layout().buffers[buffer]),
        bytes_(task.pool->buffer(buffer)),
        page_rows_(place_.shape.rows_of_page(task.pool->page_size())),
        pitch_(place_.shape.pitch_of(task.pool->page_size())) {}

  /// The row at local index `local` of the page list.
  std::span<const std::byte> row(std::span<const std::uint32_t> pages, std::uint64_t local) const {
    const std::uint64_t at =
        pages[static_cast<std::size_t>(local / page_rows_)] * pitch_ + local % page_rows_;
    return bytes_.subspan(static_cast<std::size_t>(at * place_.shape.row_bytes), place_.shape.row_bytes);
  }

 private:
  const BufferPlace& place_;
  std::span<const std::byte> bytes_;
  std::uint64_t page_rows_;
  std::uint64_t pitch_;
};

class Summer {
 public:
  explicit Summer(const DigestTask& task)
      : task_(task), own_(ownership(task.topology, *task.model, task.coord)) {
    out_.columns = task.grid.columns();
    if (task.peer) {
      other_ = ownership(task.peer->topology, *task.model, task.peer->coord);
    }
  }

  Digest run() {
    const auto& buffers = task_.pool->layout().buffers;
    std::vector<std::uint32_t> order;
    for (std::uint32_t b = 0; b < buffers.size(); ++b) {
      if (takes(b)) {
        order.push_back(b);
        out_.layers.push_back(buffers[b].shape.layer);
      }
    }
    std::sort(out_.layers.begin(), out_.layers.end());
    out_.layers.erase(std::unique(out_.layers.begin(), out_.layers.end()), out_.layers.end());
    out_.sums.assign(out_.layers.size() * out_.columns, 0);
    for (const std::uint32_t b : order) {
      add_buffer(b);
    }
    return std::move(out_);
  }

 private:
  bool takes(std::uint32_t buffer) const {
    if (!task_.peer) {
      return task_.model->has_buffer(task_.pool->layout().buffers[buffer].shape.id());
    }
    const std::vector<std::uint32_t>& sent = task_.peer->buffers;
    return std::binary_search(sent.begin(), sent.end(), buffer);
  }

  void add_buffer(std::uint32_t buffer) {
    const BufferShape& shape = task_.pool->layout().buffers[buffer].shape;
    const RowSpace space = task_.pool->layout().buffers[buffer].space;
    const auto at = std::lower_bound(out_.layers.begin(), out_.layers.end(), shape.layer);
    sums_ = out_.sums.data() + static_cast<std::size_t>(at - out_.layers.begin()) * out_.columns;
    const BufferReader reader(task_, buffer);
    if (space == RowSpace::kState) {
      if (task_.state && selected(shape.layer, task_.grid.state_column())) {
        add_state(reader.row({&*task_.rows.state_slot, 1}, 0), shape);
      }
      return;
    }
    const bool window = space == RowSpace::kWindow;
    const Interval tokens = window ? task_.window : task_.tokens;
    const auto pages = window ? task_.rows.window_pages : task_.rows.pages;
    const std::uint64_t first = window ? task_.rows.window_first : task_.rows.first_token;
    for (const Interval& share : shares(tokens)) {
      add_tokens(reader, shape, space, share, pages, first);
    }
  }

  /// The tokens of `tokens` that a source's CP rank sends; a destination has them all.
  std::vector<Interval> shares(const Interval& tokens) const {
    if (!task_.peer) {
      return {tokens};
    }
    const CpPlace place{task_.topology.cp_split, task_.topology.cp, task_.coord.cp};
    const std::uint64_t page_tokens = std::uint64_t{task_.pool->page_size()} * task_.topology.dcp;
    std::vector<Interval> out;
    for (const Interval& share : cp_share(place, page_tokens, task_.peer->request)) {
      out.push_back(intersect(share, tokens));
    }
    return out;
  }

  bool selected(std::uint32_t layer, std::size_t column) const {
    return digest_selected(task_.room, layer, task_.grid.first() + column, task_.rate);
  }

  void add_tokens(const BufferReader& reader, const BufferShape& shape, RowSpace space,
                  const Interval& tokens, std::span<const std::uint32_t> pages, std::uint64_t first) {
    const TokenClass mine = space == RowSpace::kDraft ? TokenClass{} : own_.tokens;
    const TokenClass theirs = space == RowSpace::kDraft || !task_.peer ? TokenClass{} : other_.tokens;
    const bool per_head = shape.kind == BufferKind::kKey || shape.kind == BufferKind::kValue;
    Interval lanes = own_.heads;
    if (task_.peer) {
      lanes = intersect(own_.heads, other_.heads);
    }
    if (!per_head) {
      // Whole rows come with the destination's first head.
      const std::uint64_t head = task_.peer ? other_.heads.begin : own_.heads.begin;
      lanes = own_.heads.contains(head) ? Interval{0, 1} : Interval{};
    }
    const std::uint64_t lane_bytes = per_head ? task_.model->head_bytes(shape.kind) : shape.row_bytes;
    const std::uint64_t lane_first = per_head ? own_.heads.begin : 0;
    const std::uint64_t before = mine.owned_before(first);
    for (std::uint64_t lane = lanes.begin; lane < lanes.end; ++lane) {
      const std::uint64_t key = lane_key(shape.layer, shape.kind, lane);
      const auto offset = static_cast<std::size_t>((lane - lane_first) * lane_bytes);
      std::uint64_t local = mine.owned_before(tokens.begin) - before;
      for (std::uint64_t token = tokens.begin; token < tokens.end;) {
        const std::size_t column = task_.grid.column(token);
        const std::uint64_t end = std::min(tokens.end, (task_.grid.first() + column + 1) * task_.grid.range);
        if (!selected(shape.layer, column)) {
          token = end;
          local = mine.owned_before(token) - before;
          continue;
        }
        std::uint64_t sum = 0;
        for (; token < end; ++token) {
          if (!mine.owns(token)) {
            continue;
          }
          if (theirs.owns(token)) {
            sum += unit_hash(reader.row(pages, local).subspan(offset, static_cast<std::size_t>(lane_bytes)),
                             token_key(key, token));
          }
          ++local;
        }
        sums_[column] += sum;
      }
    }
  }

  void add_state(std::span<const std::byte> row, const BufferShape& shape) {
    const StateTensor& tensor = *task_.model->state_tensor(shape.kind);
    const std::uint32_t ranks = task_.topology.tp;
    std::uint64_t block_first = 0;  // elements of the whole tensor before this block
    std::size_t at = 0;
    std::uint64_t sum = 0;
    for (std::uint32_t outer = 0; outer < tensor.outer; ++outer) {
      for (const std::uint32_t block : tensor.blocks) {
        const std::uint64_t each = block / ranks;
        for (std::uint64_t i = 0; i < each; ++i, at += tensor.element_bytes) {
          const std::uint64_t element = task_.coord.tp * each + i;
          if (task_.peer && !peer_has(block, element)) {
            continue;
          }
          sum += unit_hash(row.subspan(at, tensor.element_bytes),
                           token_key(lane_key(shape.layer, shape.kind, block_first + element), 0));
        }
        block_first += block;
      }
    }
    sums_[task_.grid.state_column()] += sum;
  }

  bool peer_has(std::uint64_t block, std::uint64_t element) const {
    const std::uint64_t each = block / task_.peer->topology.tp;
    return element / each == task_.peer->coord.tp;
  }

  const DigestTask& task_;
  Ownership own_;
  Ownership other_;
  Digest out_;
  std::uint64_t* sums_ = nullptr;  // of the current buffer's layer
};

}  // namespace

std::uint32_t digest_range(const Interval& request) {
  const std::uint64_t wanted = (request.size() + kColumnsWanted - 1) / kColumnsWanted;
  return static_cast<std::uint32_t>(std::max<std::uint64_t>(kRangeMin, std::bit_ceil(wanted)));
}

bool digest_selected(Room room, std::uint32_t layer, std::uint64_t column, VerifyRate rate) {
  return rate == kVerifyFull ||
         (rate != kVerifyOff && mix(mix(room + layer) + column * 0xD1342543DE82EF95ull) % rate == 0);
}

void add_digest(Digest& total, const Digest& part) {
  Digest sum;
  sum.columns = part.columns;
  std::set_union(total.layers.begin(), total.layers.end(), part.layers.begin(), part.layers.end(),
                 std::back_inserter(sum.layers));
  sum.sums.assign(sum.layers.size() * sum.columns, 0);
  for (const Digest* one : {&std::as_const(total), &part}) {
    for (std::size_t i = 0; i < one->layers.size(); ++i) {
      const auto at = std::lower_bound(sum.layers.begin(), sum.layers.end(), one->layers[i]);
      const std::size_t row = static_cast<std::size_t>(at - sum.layers.begin()) * sum.columns;
      for (std::size_t column = 0; column < sum.columns; ++column) {
        sum.sums[row + column] += one->sums[i * sum.columns + column];
      }
    }
  }
  total = std::move(sum);
}

Digest compute_digest(const DigestTask& task) {
  return Summer(task).run();
}

std::optional<DigestMismatch> compare_digests(const Digest& sent, const Digest& lies, const DigestGrid& grid,
                                              std::uint32_t hidden_layers) {
  for (std::size_t i = 0; i < lies.layers.size(); ++i) {
    const std::uint32_t layer = lies.layers[i];
    const auto at = std::lower_bound(sent.layers.begin(), sent.layers.end(), layer);
    if (at == sent.layers.end() || *at != layer) {
      if (layer < hidden_layers) {
        return DigestMismatch{layer, grid.tokens, true};
      }
      continue;
    }
    const std::size_t row = static_cast<std::size_t>(at - sent.layers.begin()) * sent.columns;
    for (std::size_t column = 0; column < lies.columns; ++column) {
      if (sent.sums[row + column] != lies.sums[i * lies.columns + column]) {
        const Interval tokens{(grid.first() + column) * grid.range, (grid.first() + column + 1) * grid.range};
        return DigestMismatch{layer, intersect(tokens, grid.tokens), false};
      }
    }
  }
  return std::nullopt;
}

}  // namespace kvferry
