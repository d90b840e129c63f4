#include "tests/unit/plan/oracle.h"

#include <fmt/format.h>

#include <algorithm>

namespace kvferry::oracle {

std::vector<std::uint32_t> heads(const ModelGeometry& model, const Topology& topology, std::uint32_t tp) {
  if (model.attention == AttentionKind::kMla) {
    return {0};
  }
  // Neighbours of dcp ranks hold the same heads.
  const std::uint32_t total = model.kv_heads;
  const std::uint32_t groups = topology.tp / topology.dcp;
  const std::uint32_t group = tp / topology.dcp;
  if (groups > total) {
    return {group * total / groups};
  }
  std::vector<std::uint32_t> out;
  for (std::uint32_t head = 0; head < total; ++head) {
    if (head * groups / total == group) {
      out.push_back(head);
    }
  }
  return out;
}

std::vector<std::uint32_t> layers(const ModelGeometry& model, const Topology& topology, std::uint32_t pp) {
  std::vector<std::uint32_t> stage_of;
  for (std::uint32_t stage = 0; stage < topology.pp; ++stage) {
    const std::uint32_t rest = model.hidden_layers % topology.pp;
    const std::uint32_t count = topology.pp_layers.empty()
                                    ? model.hidden_layers / topology.pp + (stage < rest ? 1 : 0)
                                    : topology.pp_layers[stage];
    stage_of.insert(stage_of.end(), count, stage);
  }
  std::vector<std::uint32_t> out;
  for (std::uint32_t layer = 0; layer < stage_of.size(); ++layer) {
    if (stage_of[layer] == pp) {
      out.push_back(layer);
    }
  }
  return out;
}

bool owns_token(const Topology& topology, std::uint32_t tp, std::uint64_t token) {
  return topology.dcp == 1 || (token / topology.dcp_interleave) % topology.dcp == tp % topology.dcp;
}

std::uint64_t owned_in(const Topology& topology, std::uint32_t tp, std::uint64_t from, std::uint64_t to) {
  std::uint64_t count = 0;
  for (std::uint64_t token = from; token < to; ++token) {
    count += owns_token(topology, tp, token) ? 1 : 0;
  }
  return count;
}

std::uint32_t cp_sender(const Topology& topology, std::uint32_t page_size, std::uint64_t begin,
                        std::uint64_t end, std::uint64_t token) {
  if (topology.cp_split == CpSplit::kNone) {
    return 0;
  }
  const bool zigzag = topology.cp_split == CpSplit::kZigzag;
  std::vector<std::uint64_t> parts(topology.cp * (zigzag ? 2 : 1));  // pages of each part
  std::size_t next = 0;
  for (std::uint64_t at = begin; at < end; at += page_size * topology.dcp) {
    ++parts[next++ % parts.size()];
  }
  std::uint64_t edge = begin;
  for (std::size_t part = 0; part < parts.size(); ++part) {
    edge += parts[part] * page_size * topology.dcp;
    if (token < edge) {
      return static_cast<std::uint32_t>(part < topology.cp ? part : parts.size() - 1 - part);
    }
  }
  return topology.cp;  // nobody
}

bool layer_has_kv(const ModelGeometry& model, std::uint32_t layer) {
  const auto in = [layer](const std::vector<std::uint32_t>& ids) {
    return std::find(ids.begin(), ids.end(), layer) != ids.end();
  };
  return in(model.kv_layers) || in(model.sliding_layers);
}

bool side_is_legal(const ModelGeometry& model, const Topology& topology, std::uint32_t page_size) {
  if (topology.tp < 1 || topology.pp < 1 || topology.cp < 1 || topology.dp < 1 || topology.dcp < 1 ||
      topology.dcp_interleave < 1 || page_size < 1 || topology.tp % topology.dcp != 0 ||
      topology.pp > model.hidden_layers) {
    return false;
  }
  std::uint32_t staged = 0;
  for (const std::uint32_t count : topology.pp_layers) {
    if (count == 0) {
      return false;
    }
    staged += count;
  }
  if (!topology.pp_layers.empty() &&
      (topology.pp_layers.size() != topology.pp || staged != model.hidden_layers)) {
    return false;
  }
  const std::uint32_t groups = topology.tp / topology.dcp;
  if (model.attention == AttentionKind::kMha && model.kv_heads % groups != 0 &&
      groups % model.kv_heads != 0) {
    return false;
  }
  if (topology.dcp > 1 && page_size % topology.dcp_interleave != 0) {
    return false;
  }
  // Each token of each head must be held, and by equally many ranks: an uneven spread (3 ranks over 2 DCP
  // ranks) is not a layout that any engine builds.
  const std::uint32_t shares = model.kv_heads * topology.dcp;
  for (std::uint32_t head = 0; head < model.kv_heads; ++head) {
    for (std::uint32_t token = 0; token < topology.dcp * topology.dcp_interleave; ++token) {
      std::uint32_t holders = 0;
      std::uint32_t held_heads = 0;
      for (std::uint32_t tp = 0; tp < topology.tp; ++tp) {
        const std::vector<std::uint32_t> own = heads(model, topology, tp);
        held_heads += static_cast<std::uint32_t>(own.size());
        holders += owns_token(topology, tp, token) && std::find(own.begin(), own.end(), head) != own.end();
      }
      if (holders == 0 || holders * shares != held_heads) {
        return false;
      }
    }
  }
  return true;
}

bool pair_is_legal(const ModelGeometry& model, const Topology& prefill, std::uint32_t prefill_page,
                   const Topology& decode, std::uint32_t decode_page) {
  if (!side_is_legal(model, prefill, prefill_page) || !side_is_legal(model, decode, decode_page)) {
    return false;
  }
  return decode.cp == 1 || decode.cp_split == CpSplit::kNone;
}

std::uint64_t tag(std::uint32_t layer, BufferKind kind, std::uint32_t head, std::uint64_t token,
                  std::uint32_t byte) {
  return 1 + byte + 64 * (head + 32 * (static_cast<std::uint64_t>(kind) + 4 * (layer + 256 * token)));
}

RankView::RankView(const ModelGeometry& model, const RankShape& shape, std::uint64_t first_token,
                   std::uint64_t end, const std::vector<std::uint32_t>& pages)
    : model_(model), shape_(shape), heads_(heads(model, shape.topology, shape.coord.tp)) {
  const std::uint64_t pool_pages = shape.buffers.empty() ? 0 : shape.buffers[0].pages;
  tokens_.assign(pool_pages * shape.page_size, -1);
  std::uint64_t row = 0;
  for (std::uint64_t token = first_token; token < end && row < pages.size() * shape.page_size; ++token) {
    if (owns_token(shape.topology, shape.coord.tp, token)) {
      const std::uint64_t at =
          std::uint64_t{pages[row / shape.page_size]} * shape.page_size + row % shape.page_size;
      if (at < tokens_.size()) {
        tokens_[at] = static_cast<std::int64_t>(token);
      }
      ++row;
    }
  }
}

std::int64_t RankView::token_at(std::uint64_t row) const {
  return row < tokens_.size() ? tokens_[row] : -1;
}

std::uint64_t RankView::read(std::uint32_t buffer, std::uint64_t row, std::uint32_t byte) const {
  const std::int64_t token = token_at(row);
  if (token < 0) {
    return 0;
  }
  const BufferShape& shape = shape_.buffers[buffer];
  const std::uint32_t head_bytes = model_.head_bytes(shape.kind);
  return tag(shape.layer, shape.kind, heads_[byte / head_bytes], static_cast<std::uint64_t>(token),
             byte % head_bytes);
}

Written::Written(const RankShape& shape) : shape_(shape) {
  for (const BufferShape& buffer : shape.buffers) {
    cells_.emplace_back(buffer.pages * shape.page_size * buffer.row_bytes);
  }
}

bool Written::apply(const Plan& plan, const RankShape& src_shape, const RankView& src, std::string& why) {
  std::uint64_t moved = 0;
  for (const BufferPair& pair : plan.pairs) {
    if (pair.src_buffer >= src_shape.buffers.size() || pair.dst_buffer >= cells_.size() ||
        pair.src_row_bytes != src_shape.buffers[pair.src_buffer].row_bytes ||
        pair.dst_row_bytes != shape_.buffers[pair.dst_buffer].row_bytes ||
        pair.src_offset + pair.bytes > pair.src_row_bytes ||
        pair.dst_offset + pair.bytes > pair.dst_row_bytes) {
      why = "a pair leaves its buffers or rows";
      return false;
    }
    std::vector<Cell>& cells = cells_[pair.dst_buffer];
    for (const RowRun& run : plan.runs) {
      for (std::uint64_t piece = 0; piece < run.count; ++piece) {
        for (std::uint64_t row = 0; row < run.rows; ++row) {
          const std::uint64_t from = run.src_row + piece * run.src_step + row;
          const std::uint64_t into = run.dst_row + piece * run.dst_step + row;
          if (from >= src.rows() || (into + 1) * pair.dst_row_bytes > cells.size()) {
            why = fmt::format("row {} -> {} is outside a pool", from, into);
            return false;
          }
          for (std::uint32_t byte = 0; byte < pair.bytes; ++byte) {
            Cell& cell = cells[into * pair.dst_row_bytes + pair.dst_offset + byte];
            cell.tag = src.read(pair.src_buffer, from, pair.src_offset + byte);
            ++cell.writes;
            ++moved;
          }
        }
      }
    }
  }
  why = fmt::format("plan says {} bytes, its runs move {}", plan.bytes, moved);
  return moved == plan.bytes;
}

bool Written::matches(const RankView& view, std::uint64_t begin, std::uint64_t end, std::string& why) const {
  for (std::uint32_t buffer = 0; buffer < cells_.size(); ++buffer) {
    const std::uint32_t row_bytes = shape_.buffers[buffer].row_bytes;
    for (std::uint64_t row = 0; row < view.rows(); ++row) {
      const std::int64_t token = view.token_at(row);
      const bool wanted =
          token >= 0 && static_cast<std::uint64_t>(token) >= begin && static_cast<std::uint64_t>(token) < end;
      for (std::uint32_t byte = 0; byte < row_bytes; ++byte) {
        const Cell& cell = cells_[buffer][row * row_bytes + byte];
        const std::uint64_t right = wanted ? view.read(buffer, row, byte) : 0;
        if (cell.writes != (wanted ? 1u : 0u) || cell.tag != right) {
          why = fmt::format("buffer {} row {} byte {} (token {}): {} writes, tag {} instead of {}", buffer,
                            row, byte, token, cell.writes, cell.tag, right);
          return false;
        }
      }
    }
  }
  return true;
}

}  // namespace kvferry::oracle
