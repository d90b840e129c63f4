#include <algorithm>
#include <map>
#include <set>

#include "common/handshake/rule_table.h"
#include "common/handshake/shapes.h"

namespace kvferry {
namespace {

bool is_mla(const Descriptor& side) {
  return side.geometry.attention == AttentionKind::kMla;
}

/// KV heads that one rank's rows hold; 1 for MLA, whose latent is not split by head.
std::uint64_t heads_per_rank(const Descriptor& side) {
  const Topology& topology = side.topology;
  return is_mla(side) ? 1 : std::max(1U, side.geometry.kv_heads / std::max(1U, topology.tp / topology.dcp));
}

/// Parts that the rows of a buffer are made of on one rank: heads, or 1.
std::uint64_t parts_per_row(const Descriptor& side, BufferKind kind) {
  return kind == BufferKind::kKey || kind == BufferKind::kValue ? heads_per_rank(side) : 1;
}

std::uint64_t rows_per_page(const Descriptor& side, const BufferDescription& buffer) {
  return rows_of_page(side.geometry.row_space({buffer.layer, buffer.kind}), side.page_size, side.topology);
}

using EntryKey = std::pair<std::uint32_t, BufferKind>;  // layer, kind

std::string entry_name(const EntryKey& key) {
  return fmt::format("layer {} {}", key.first, to_string(key.second));
}

/// Layers beyond these belong to nobody.
std::uint32_t known_layers(const ModelGeometry& model) {
  return model.hidden_layers + model.draft_layers;
}

bool known_layer(const ModelGeometry& model, std::uint32_t layer) {
  for (std::uint32_t kind = 0; kind < kBufferKinds; ++kind) {
    if (model.has_buffer({layer, static_cast<BufferKind>(kind)})) {
      return true;
    }
  }
  return false;
}

/// Something found in several entries: the first in full, the others as a number.
struct FirstOf {
  std::string text;
  std::size_t count = 0;

  void add(std::string found) {
    if (count++ == 0) {
      text = std::move(found);
    }
  }
  std::string more() const { return count > 1 ? fmt::format(" (and {} more entries)", count - 1) : ""; }
};

std::string entry_count(const Descriptor& side) {
  return fmt::format("{} entries", side.ranks.empty() ? 0 : side.ranks.front().buffers.size());
}

/// Notes every entry that is missing of the model's (`wanted`), repeated or of the wrong kind on one rank.
/// Entries of other layers are another rule's matter.
void check_rank_entries(const Descriptor& side, const std::vector<BufferId>& wanted,
                        const RankDescription& rank, FirstOf& found) {
  std::set<EntryKey> present;
  for (std::size_t i = 0; i < rank.buffers.size(); ++i) {
    const EntryKey key{rank.buffers[i].layer, rank.buffers[i].kind};
    if (!present.insert(key).second) {
      found.add(fmt::format("rank {} lists {} twice, again at entry {}", rank.index, entry_name(key), i));
    }
    if (known_layer(side.geometry, key.first) && !side.geometry.has_buffer({key.first, key.second})) {
      found.add(fmt::format("rank {} has {} at entry {}, but {} pools have no {} buffers", rank.index,
                            entry_name(key), i, to_string(side.geometry.attention), to_string(key.second)));
    }
  }
  const Ownership own = ownership(side.topology, side.geometry, side.topology.coord(rank.index));
  for (const BufferId& id : wanted) {
    if (own.has_layer(side.geometry, id.layer) && !present.contains({id.layer, id.kind})) {
      found.add(fmt::format("rank {} has no entry for {}", rank.index, entry_name({id.layer, id.kind})));
    }
  }
}

void check_entries(const PeerPair& pair, RuleReport& report) {
  for (const Descriptor* side : {&pair.prefill, &pair.decode}) {
    if (!layout_is_legal(*side)) {
      continue;
    }
    FirstOf found;
    const std::vector<BufferId> wanted = side->geometry.pool_buffers(true);
    for (const RankDescription& rank : side->ranks) {
      if (rank.index < side->topology.rank_count()) {
        check_rank_entries(*side, wanted, rank, found);
      }
    }
    if (found.count > 0) {
      report.error({.field = "ranks.buffers",
                    .prefill = entry_count(pair.prefill),
                    .decode = entry_count(pair.decode),
                    .message = fmt::format("the pool needs one KV entry per layer and kind, but {} {}{}",
                                           side_name(pair, *side), found.text, found.more()),
                    .fix = fmt::format("attach the {} pool with every layer of its stage exactly once",
                                       side_name(pair, *side))});
    }
  }
}

/// One entry of a side with what one head of one token takes; bytes is 0 where the page does not divide.
struct Entry {
  std::size_t index = 0;  // in its rank's list
  RankIndex rank = 0;
  std::uint64_t bytes = 0;
};

/// State is compared whole: a rank's share times the ranks that share it.
std::uint64_t bytes_per_head(const Descriptor& side, const BufferDescription& buffer) {
  const std::uint64_t divisor = rows_per_page(side, buffer) * parts_per_row(side, buffer.kind);
  if (divisor == 0 || buffer.item_len % divisor != 0) {
    return 0;
  }
  return buffer.item_len / divisor * (is_state(buffer.kind) ? side.topology.tp : 1);
}

std::map<EntryKey, Entry> first_entries(const Descriptor& side) {
  std::map<EntryKey, Entry> out;
  for (const RankDescription& rank : side.ranks) {
    for (std::size_t i = 0; i < rank.buffers.size(); ++i) {
      out.emplace(EntryKey{rank.buffers[i].layer, rank.buffers[i].kind},
                  Entry{i, rank.index, bytes_per_head(side, rank.buffers[i])});
    }
  }
  return out;
}

/// Entries of `side` whose layer the target model does not have; `inside` = those below hidden_layers.
FirstOf extra_entries(const Descriptor& side, bool inside) {
  FirstOf found;
  for (const RankDescription& rank : side.ranks) {
    for (std::size_t i = 0; i < rank.buffers.size(); ++i) {
      const BufferDescription& buffer = rank.buffers[i];
      if (!known_layer(side.geometry, buffer.layer) &&
          (buffer.layer < known_layers(side.geometry)) == inside) {
        found.add(
            fmt::format("rank {} entry {} ({})", rank.index, i, entry_name({buffer.layer, buffer.kind})));
      }
    }
  }
  return found;
}

// Only the layers of the target and of the draft model move. What prefill computed beyond them would be lost
// without a word; what decode holds beyond them starts empty, which costs speed and not correctness.
void check_extra_entries(const PeerPair& pair, RuleReport& report) {
  for (const Descriptor* side : {&pair.prefill, &pair.decode}) {
    for (const bool inside : {true, false}) {
      const FirstOf found = extra_entries(*side, inside);
      if (found.count == 0) {
        continue;
      }
      const bool harmless = side == &pair.decode && !inside;
      RuleReport::Finding finding{
          .field = "ranks.buffers",
          .prefill = entry_count(pair.prefill),
          .decode = entry_count(pair.decode),
          .message = fmt::format("{} {} lies outside the {} layers of the model{}{}", side_name(pair, *side),
                                 found.text, side->geometry.hidden_layers,
                                 harmless ? " and stays unfilled" : "", found.more()),
          .fix = "attach the target model's layers only, or use the same draft settings on both sides"};
      if (harmless) {
        report.warning(std::move(finding));
      } else {
        report.error(std::move(finding));
      }
    }
  }
}

// Compared per head of one token, so that unequal TP and DCP sizes compare what really moves.
void check_item_len(const PeerPair& pair, RuleReport& report) {
  const auto decode = first_entries(pair.decode);
  std::uint64_t first_prefill = 0;
  std::uint64_t first_decode = 0;
  FirstOf found;
  std::set<std::pair<EntryKey, std::uint64_t>> seen;  // several ranks with the same fault are one finding
  for (const RankDescription& rank : pair.prefill.ranks) {
    for (std::size_t i = 0; i < rank.buffers.size(); ++i) {
      const EntryKey key{rank.buffers[i].layer, rank.buffers[i].kind};
      const auto peer = decode.find(key);
      const std::uint64_t bytes = bytes_per_head(pair.prefill, rank.buffers[i]);
      if (peer == decode.end() || bytes == 0 || peer->second.bytes == 0 || bytes == peer->second.bytes ||
          !seen.insert({key, bytes}).second) {
        continue;
      }
      if (found.count == 0) {
        first_prefill = bytes;
        first_decode = peer->second.bytes;
      }
      found.add(fmt::format("{} ({})", i, entry_name(key)));
    }
  }
  if (found.count > 0) {
    report.error(
        {.field = "ranks.buffers.item_len",
         .prefill = fmt::format("{}", first_prefill),
         .decode = fmt::format("{}", first_decode),
         .message = fmt::format("KV geometry differs at entry {}: one head of one token takes {} bytes at "
                                "prefill and {} at decode{}",
                                found.text, first_prefill, first_decode, found.more()),
         .fix = "use the same KV dtype, head size and draft model on both sides"});
  }
}

/// What is wrong with the rows of one entry on its own side, or an empty text.
std::string row_problem(const Descriptor& side, const BufferDescription& buffer) {
  if (!side.geometry.has_buffer({buffer.layer, buffer.kind})) {
    return {};  // other rules name it; such a row has no right size
  }
  const std::uint64_t bytes = bytes_per_head(side, buffer);
  if (bytes == 0) {
    return fmt::format("item_len {} is not a whole number of {} tokens of {} heads", buffer.item_len,
                       rows_per_page(side, buffer), parts_per_row(side, buffer.kind));
  }
  const StateTensor* tensor = side.geometry.state_tensor(buffer.kind);
  const std::uint64_t needed = tensor != nullptr ? tensor->outer * tensor->elements() * tensor->element_bytes
                                                 : side.geometry.head_bytes(buffer.kind);
  if (bytes != needed) {
    return fmt::format("item_len {} gives one head of one token {} bytes, but the model needs {}",
                       buffer.item_len, bytes, needed);
  }
  return {};
}

void check_row_bytes(const PeerPair& pair, RuleReport& report) {
  for (const Descriptor* side : {&pair.prefill, &pair.decode}) {
    FirstOf found;
    std::uint64_t first = 0;
    const auto entries = first_entries(*side);
    for (const RankDescription& rank : side->ranks) {
      for (std::size_t i = 0; i < rank.buffers.size(); ++i) {
        const EntryKey key{rank.buffers[i].layer, rank.buffers[i].kind};
        std::string problem = row_problem(*side, rank.buffers[i]);
        const Entry& reference = entries.at(key);
        if (problem.empty() && bytes_per_head(*side, rank.buffers[i]) != reference.bytes) {
          problem = fmt::format("item_len {} differs from what rank {} says", rank.buffers[i].item_len,
                                reference.rank);
        }
        if (!problem.empty()) {
          first = found.count == 0 ? rank.buffers[i].item_len : first;
          found.add(fmt::format("rank {} entry {} ({}): {}", rank.index, i, entry_name(key), problem));
        }
      }
    }
    if (found.count > 0) {
      const bool is_prefill = side == &pair.prefill;
      report.error({.field = "ranks.buffers.item_len",
                    .prefill = is_prefill ? fmt::format("{}", first) : "",
                    .decode = is_prefill ? "" : fmt::format("{}", first),
                    .message = fmt::format("the rows of the {} pool do not fit its model: {}{}",
                                           side_name(pair, *side), found.text, found.more()),
                    .fix = "attach the pool with the page size, dtype and head count it really has"});
    }
  }
}

/// The first difference between two aux schemas, or an empty text.
std::string aux_difference(const std::vector<AuxDescription>& a, const std::vector<AuxDescription>& b) {
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    if (a[i].name != b[i].name || a[i].width != b[i].width) {
      return fmt::format("aux buffer {} is {} of {} bytes against {} of {} bytes", i, a[i].name, a[i].width,
                         b[i].name, b[i].width);
    }
  }
  if (a.size() != b.size()) {
    return fmt::format("{} against {} aux buffers, the first {} alike", a.size(), b.size(),
                       std::min(a.size(), b.size()));
  }
  return {};
}

void check_aux_schema(const PeerPair& pair, RuleReport& report) {
  if (pair.prefill.ranks.empty() || pair.decode.ranks.empty()) {
    return;
  }
  const RankDescription& reference = pair.decode.ranks.front();
  for (const Descriptor* side : {&pair.prefill, &pair.decode}) {
    for (const RankDescription& rank : side->ranks) {
      const std::string difference = aux_difference(rank.aux, reference.aux);
      if (difference.empty()) {
        continue;
      }
      const bool is_prefill = side == &pair.prefill;
      report.error(
          {.field = "ranks.aux",
           .prefill =
               fmt::format("{} aux buffers", (is_prefill ? rank : pair.prefill.ranks.front()).aux.size()),
           .decode = fmt::format("{} aux buffers", (is_prefill ? reference : rank).aux.size()),
           .message = fmt::format("aux schema differs: {} rank {} against decode rank {}: {}",
                                  side_name(pair, *side), rank.index, reference.index, difference),
           .fix = "use the same engine version, speculation and sampling mask settings on all ranks"});
      break;
    }
  }
}

std::string component_list(const Descriptor& side) {
  std::string out;
  for (const std::string& component : side.state_components) {
    out += (out.empty() ? "" : ",") + component;
    if (out.size() > 1024) {
      return out + ",...";
    }
  }
  return out.empty() ? "none" : out;
}

void check_state_components(const PeerPair& pair, RuleReport& report) {
  if (pair.prefill.state_components == pair.decode.state_components) {
    return;
  }
  report.error(
      {.field = "state_components",
       .prefill = component_list(pair.prefill),
       .decode = component_list(pair.decode),
       .message = fmt::format("state components differ in type, order or number: prefill {}, decode {}",
                              component_list(pair.prefill), component_list(pair.decode)),
       .fix = "serve the same model with the same hybrid memory options on both sides"});
}

// The last word: what no rule above named is still refused here, before a transfer is planned on it.
void check_layout(const PeerPair& pair, RuleReport& report) {
  if (report.refused()) {
    return;
  }
  const auto complain = [&](const Error& error) {
    report.error({.field = "topology",
                  .prefill = to_string(pair.prefill.topology),
                  .decode = to_string(pair.decode.topology),
                  .message = fmt::format("no transfer can be planned: {}", error.message),
                  .fix = "correct what the message names"});
  };
  std::vector<RankShape> decode;
  for (const RankDescription& rank : pair.decode.ranks) {
    decode.push_back(rank_shape(pair.decode, rank));
  }
  for (const RankDescription& rank : pair.prefill.ranks) {
    const RankShape source = rank_shape(pair.prefill, rank);
    for (const RankShape& destination : decode) {
      if (const auto layout = pair_layouts(pair.prefill.geometry, source, destination); !layout) {
        complain(layout.error());
        return;
      }
    }
  }
}

constexpr Rule kRules[] = {
    {"entries", check_entries},       {"extra_entries", check_extra_entries},
    {"item_len", check_item_len},     {"row_bytes", check_row_bytes},
    {"aux_schema", check_aux_schema}, {"state_components", check_state_components},
    {"layout", check_layout},
};

}  // namespace

std::span<const Rule> buffer_rules() {
  return kRules;
}

}  // namespace kvferry
