#include "tests/unit/plan/hybrid_oracle.h"

#include <fmt/format.h>

#include <algorithm>

#include "tests/unit/plan/oracle.h"

namespace kvferry::oracle {
namespace {

bool in(const std::vector<std::uint32_t>& ids, std::uint32_t id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

std::uint32_t element_bytes(Dtype dtype) {
  return dtype == Dtype::kFp32 ? 4 : dtype == Dtype::kBf16 || dtype == Dtype::kFp16 ? 2 : 1;
}

/// Bytes of one head of one token, or of one index row, counted element by element.
std::uint32_t unit_bytes(const ModelGeometry& model, BufferKind kind) {
  const auto scales = [](std::uint32_t elements) {
    std::uint32_t bytes = 0;
    for (std::uint32_t element = 0; element < elements; ++element) {
      bytes += element % 128 == 0 ? 4 : 0;
    }
    return bytes;
  };
  const std::uint32_t element = element_bytes(model.dtype);
  const bool scaled = model.index_head_dim > 0 && model.dtype == Dtype::kFp8E4m3;
  switch (kind) {
    case BufferKind::kKey:
      return model.head_dim * element;
    case BufferKind::kValue:
      return model.v_head_dim * element;
    case BufferKind::kLatent:
      return scaled ? model.latent_dim + scales(model.latent_dim) + 2 * model.rope_dim
                    : (model.latent_dim + model.rope_dim) * element;
    case BufferKind::kIndexKey:
      return model.index_head_dim;
    default:
      return scales(model.index_head_dim);
  }
}

const StateTensor* tensor_of(const ModelGeometry& model, BufferKind kind) {
  for (const StateTensor& tensor : model.state) {
    if (tensor.kind == kind) {
      return &tensor;
    }
  }
  return nullptr;
}

/// Which of `ranks` has element `element` of a block of `size`.
std::uint32_t state_owner(std::uint64_t element, std::uint64_t size, std::uint32_t ranks) {
  return static_cast<std::uint32_t>(element * ranks / size);
}

bool deals_evenly(std::uint32_t block, std::uint32_t ranks) {
  std::vector<std::uint32_t> shares(ranks);
  for (std::uint32_t element = 0; element < block; ++element) {
    ++shares[state_owner(element, block, ranks)];
  }
  return std::all_of(shares.begin(), shares.end(), [&](std::uint32_t n) { return n > 0 && n == shares[0]; });
}

std::uint64_t pack(const BufferId& id, std::uint64_t unit, std::uint64_t byte) {
  return 1 + byte + 256 * (unit + 65536 * (static_cast<std::uint64_t>(id.kind) + 8ull * id.layer));
}

/// Whether the rank has a row for `token` in a buffer of `space`.
bool has_row(RowSpace space, const RankShape& shape, std::uint64_t token) {
  return space == RowSpace::kDraft || space == RowSpace::kState ||
         owns_token(shape.topology, shape.coord.tp, token);
}

}  // namespace

RowSpace space_of(const ModelGeometry& model, const BufferId& id) {
  if (id.kind == BufferKind::kConv || id.kind == BufferKind::kRecurrent) {
    return RowSpace::kState;
  }
  if (id.layer >= model.hidden_layers) {
    return RowSpace::kDraft;
  }
  return in(model.sliding_layers, id.layer) ? RowSpace::kWindow : RowSpace::kTokens;
}

std::vector<BufferId> buffers_of(const ModelGeometry& model, const Topology& topology, const RankCoord& coord,
                                 bool with_draft) {
  std::vector<std::uint32_t> own = layers(model, topology, coord.pp);
  if (with_draft && coord.pp + 1 == topology.pp) {
    for (std::uint32_t layer = 0; layer < model.draft_layers; ++layer) {
      own.push_back(model.hidden_layers + layer);
    }
  }
  const std::vector<BufferKind> attention = model.attention == AttentionKind::kMla
                                                ? std::vector{BufferKind::kLatent}
                                                : std::vector{BufferKind::kKey, BufferKind::kValue};
  std::vector<BufferId> out;
  for (const std::uint32_t layer : own) {
    const bool full = layer >= model.hidden_layers || in(model.kv_layers, layer);
    if (full || in(model.sliding_layers, layer)) {
      for (const BufferKind kind : attention) {
        out.push_back({layer, kind});
      }
    }
    if (full && model.index_head_dim > 0) {
      out.push_back({layer, BufferKind::kIndexKey});
      out.push_back({layer, BufferKind::kIndexScale});
    }
    if (in(model.state_layers, layer)) {
      for (const StateTensor& tensor : model.state) {
        out.push_back({layer, tensor.kind});
      }
    }
  }
  return out;
}

std::uint32_t rows_in_page(RowSpace space, std::uint32_t page_size, const Topology& topology) {
  if (space == RowSpace::kState) {
    return 1;
  }
  // A virtual page, token by token.
  std::uint32_t rows = 0;
  for (std::uint32_t token = 0; token < page_size * topology.dcp; ++token) {
    rows += space == RowSpace::kDraft || owns_token(topology, 0, token) ? 1 : 0;
  }
  return rows;
}

std::vector<std::uint64_t> row_tags(const ModelGeometry& model, const Topology& topology, std::uint32_t tp,
                                    const BufferId& id) {
  std::vector<std::uint64_t> tags;
  const auto add = [&](std::uint64_t unit, std::uint32_t bytes) {
    for (std::uint32_t byte = 0; byte < bytes; ++byte) {
      tags.push_back(pack(id, unit, byte));
    }
  };
  if (const StateTensor* tensor = tensor_of(model, id.kind); tensor != nullptr) {
    std::uint64_t unit = 0;  // numbers all elements of the whole tensor
    for (std::uint32_t outer = 0; outer < tensor->outer; ++outer) {
      for (const std::uint32_t block : tensor->blocks) {
        for (std::uint32_t element = 0; element < block; ++element, ++unit) {
          add(unit, state_owner(element, block, topology.tp) == tp ? tensor->element_bytes : 0);
        }
      }
    }
    return tags;
  }
  if (id.kind == BufferKind::kIndexKey || id.kind == BufferKind::kIndexScale) {
    add(0, unit_bytes(model, id.kind));
    return tags;
  }
  for (const std::uint32_t head : heads(model, topology, tp)) {
    add(head, unit_bytes(model, id.kind));
  }
  return tags;
}

std::uint64_t tag_at(std::uint64_t row_tag, std::uint64_t token) {
  return row_tag + (token << 40);
}

bool hybrid_pair_is_legal(const ModelGeometry& model, const Topology& prefill, std::uint32_t prefill_page,
                          const Topology& decode, std::uint32_t decode_page) {
  if (!pair_is_legal(model, prefill, prefill_page, decode, decode_page)) {
    return false;
  }
  for (const StateTensor& tensor : model.state) {
    for (const std::uint32_t block : tensor.blocks) {
      if (!deals_evenly(block, prefill.tp) || !deals_evenly(block, decode.tp)) {
        return false;
      }
    }
  }
  return true;
}

Interval moving_tokens(RowSpace space, const PartRequest& part) {
  if (space == RowSpace::kTokens || space == RowSpace::kDraft) {
    return part.tokens;
  }
  if (!part.last) {
    return {};
  }
  if (space == RowSpace::kState) {
    return {0, 1};
  }
  Interval window{part.request.end, part.request.end};
  while (window.begin > part.request.begin && window.end - window.begin < part.window) {
    --window.begin;
  }
  return window;
}

bool part_is_legal(const RankShape& src, std::uint64_t src_pages, const RankShape& dst,
                   std::uint64_t dst_pages, RowSpace space, const PartRequest& part) {
  if (space == RowSpace::kState) {
    return !part.last || (part.src.state_slot && part.dst.state_slot && *part.src.state_slot < src_pages &&
                          *part.dst.state_slot < dst_pages);
  }
  const bool window = space == RowSpace::kWindow;
  if (window && !part.last) {
    return true;
  }
  const Interval tokens = moving_tokens(space, part);
  const auto first = [window](const RequestRows& rows) {
    return window ? rows.window_first : rows.first_token;
  };
  for (const auto& [shape, rows] : {std::pair{&src, &part.src}, {&dst, &part.dst}}) {
    if (first(*rows) > tokens.begin || first(*rows) % (shape->page_size * shape->topology.dcp) != 0) {
      return false;
    }
  }
  const auto listed = [&](const RankShape& shape, const RequestRows& rows, std::uint64_t pool_pages,
                          std::uint64_t token) {
    std::uint64_t row = 0;
    for (std::uint64_t before = first(rows); before < token; ++before) {
      row += has_row(space, shape, before) ? 1 : 0;
    }
    const auto pages = window ? rows.window_pages : rows.pages;
    const std::uint64_t index = row / rows_in_page(space, shape.page_size, shape.topology);
    return index < pages.size() && pages[index] < pool_pages;
  };
  for (std::uint64_t token = tokens.begin; token < tokens.end; ++token) {
    if (has_row(space, src, token) && has_row(space, dst, token) &&
        cp_sender(src.topology, src.page_size, part.request.begin, part.request.end, token) == src.coord.cp &&
        (!listed(src, part.src, src_pages, token) || !listed(dst, part.dst, dst_pages, token))) {
      return false;
    }
  }
  return true;
}

Memory::Memory(const RankShape& shape) {
  for (const BufferShape& buffer : shape.buffers) {
    const std::uint64_t page_rows = buffer.page_rows != 0 ? buffer.page_rows : shape.page_size;
    const std::uint64_t pitch = buffer.pitch != 0 ? buffer.pitch : page_rows;
    // The last page has nothing behind it.
    buffers_.emplace_back(((buffer.pages - 1) * pitch + page_rows) * buffer.row_bytes);
  }
}

Memory::Memory(const ModelGeometry& model, const RankShape& shape, const RequestRows& rows,
               const Content& content)
    : Memory(shape) {
  for (std::size_t buffer = 0; buffer < shape.buffers.size(); ++buffer) {
    const BufferShape& to = shape.buffers[buffer];
    const BufferId id{to.layer, to.kind};
    const RowSpace space = space_of(model, id);
    if (id.layer >= model.hidden_layers + model.draft_layers ||
        (space == RowSpace::kDraft && !content.draft)) {
      continue;
    }
    const std::vector<std::uint64_t> tags = row_tags(model, shape.topology, shape.coord.tp, id);
    const std::uint64_t page_rows = rows_in_page(space, shape.page_size, shape.topology);
    const std::uint64_t pitch = to.pitch != 0 ? to.pitch : page_rows;
    if (space == RowSpace::kState) {
      put(shape, buffer, tags, rows.state_slot.value() * pitch, 0);
      continue;
    }
    const bool window = space == RowSpace::kWindow;
    const Interval& kept = window ? content.window : content.tokens;
    const auto pages = window ? rows.window_pages : rows.pages;
    std::uint64_t row = 0;
    for (std::uint64_t token = window ? rows.window_first : rows.first_token; token < kept.end; ++token) {
      if (has_row(space, shape, token)) {
        if (token >= kept.begin) {
          put(shape, buffer, tags, pages[row / page_rows] * pitch + row % page_rows, token);
        }
        ++row;
      }
    }
  }
}

void Memory::put(const RankShape& shape, std::size_t buffer, const std::vector<std::uint64_t>& tags,
                 std::uint64_t row, std::uint64_t token) {
  for (std::size_t byte = 0; byte < tags.size(); ++byte) {
    buffers_[buffer].at(row * shape.buffers[buffer].row_bytes + byte) = tag_at(tags[byte], token);
  }
}

Ledger::Ledger(const RankShape& shape) : shape_(shape), tags_(Memory(shape).buffers()) {
  for (const auto& buffer : tags_) {
    written_.emplace_back(buffer.size());
  }
}

bool Ledger::apply(const Plan& plan, const RankShape& src_shape, const Memory& src, std::string& why) {
  std::uint64_t rows = 0;
  for (const RowRun& run : plan.runs) {
    rows += std::uint64_t{run.count} * run.rows;
  }
  std::uint64_t row_bytes = 0;
  for (const BufferPair& pair : plan.pairs) {
    row_bytes += pair.bytes;
    if (pair.src_buffer >= src_shape.buffers.size() || pair.dst_buffer >= tags_.size() || pair.bytes == 0 ||
        pair.src_row_bytes != src_shape.buffers[pair.src_buffer].row_bytes ||
        pair.dst_row_bytes != shape_.buffers[pair.dst_buffer].row_bytes ||
        pair.src_offset + pair.bytes > pair.src_row_bytes ||
        pair.dst_offset + pair.bytes > pair.dst_row_bytes) {
      why = "a pair is empty or leaves its buffers or rows";
      return false;
    }
    for (const RowRun& run : plan.runs) {
      for (std::uint64_t piece = 0; piece < run.count; ++piece) {
        for (std::uint64_t row = 0; row < run.rows; ++row) {
          if (!apply_rows(pair, run.src_row + piece * run.src_step + row,
                          run.dst_row + piece * run.dst_step + row, src, why)) {
            return false;
          }
        }
      }
    }
  }
  why = fmt::format("plan says {} rows and {} bytes, its runs move {} rows of {} bytes", plan.rows,
                    plan.bytes, rows, row_bytes);
  return plan.rows == rows && plan.bytes == rows * row_bytes;
}

bool Ledger::apply_rows(const BufferPair& pair, std::uint64_t src_row, std::uint64_t dst_row,
                        const Memory& src, std::string& why) {
  const std::vector<std::uint64_t>& from = src.buffers()[pair.src_buffer];
  std::vector<std::uint64_t>& into = tags_[pair.dst_buffer];
  const std::uint64_t src_at = src_row * pair.src_row_bytes + pair.src_offset;
  const std::uint64_t dst_at = dst_row * pair.dst_row_bytes + pair.dst_offset;
  if (src_at + pair.bytes > from.size() || dst_at + pair.bytes > into.size()) {
    why = fmt::format("row {} -> {} of buffers {} -> {} is outside a pool", src_row, dst_row, pair.src_buffer,
                      pair.dst_buffer);
    return false;
  }
  for (std::uint32_t byte = 0; byte < pair.bytes; ++byte) {
    if (std::exchange(written_[pair.dst_buffer][dst_at + byte], std::uint8_t{1}) != 0) {
      why = fmt::format("buffer {} row {} byte {} is written twice", pair.dst_buffer, dst_row,
                        pair.dst_offset + byte);
      return false;
    }
    into[dst_at + byte] = from[src_at + byte];
  }
  return true;
}

bool Ledger::matches(const Memory& wanted, std::string& why) const {
  for (std::size_t buffer = 0; buffer < tags_.size(); ++buffer) {
    for (std::size_t at = 0; at < tags_[buffer].size(); ++at) {
      const std::uint64_t right = wanted.buffers()[buffer][at];
      const bool written = written_[buffer][at] != 0;
      if (written != (right != 0) || tags_[buffer][at] != right) {
        const BufferShape& shape = shape_.buffers[buffer];
        why = fmt::format("buffer {} (layer {} {}) row {} byte {}: {}, tag {:#x} instead of {:#x}", buffer,
                          shape.layer, to_string(shape.kind), at / shape.row_bytes, at % shape.row_bytes,
                          written ? "written" : "not written", tags_[buffer][at], right);
        return false;
      }
    }
  }
  return true;
}

}  // namespace kvferry::oracle
