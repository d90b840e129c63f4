#include "common/topology/topology.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <numeric>

namespace kvferry {
namespace {

struct SizeField {
  std::string_view key;
  std::uint32_t Topology::*field;
  std::uint32_t maximum;
};
constexpr std::array<SizeField, 6> kSizeFields{{
    {"tp", &Topology::tp, kParallelSizeMax},
    {"pp", &Topology::pp, kParallelSizeMax},
    {"cp", &Topology::cp, kParallelSizeMax},
    {"dp", &Topology::dp, kParallelSizeMax},
    {"dcp", &Topology::dcp, kParallelSizeMax},
    {"interleave", &Topology::dcp_interleave, kDcpInterleaveMax},
}};
constexpr std::string_view kLayersKey = "pp_layers";
constexpr std::string_view kSplitKey = "cp_split";

void add_problem(std::string& problems, std::string problem) {
  problems += problems.empty() ? "" : "; ";
  problems += problem;
}

Result<std::uint32_t> parse_size(std::string_view key, std::string_view text, std::uint32_t maximum) {
  std::uint32_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || value == 0 || value > maximum) {
    return fail(Code::kInvalid, "topology: {}={} is not a whole number from 1 to {}", key, text.substr(0, 32),
                maximum);
  }
  return value;
}

/// Cuts `text` at the first `separator`; the rest goes into `text`.
std::string_view cut(std::string_view& text, char separator) {
  const std::size_t at = text.find(separator);
  const std::string_view head = text.substr(0, at);
  text = at == std::string_view::npos ? std::string_view{} : text.substr(at + 1);
  return head;
}

Result<void> parse_layers(std::string_view text, Topology& topology) {
  while (!text.empty()) {
    KVF_TRY(const std::uint32_t layers, parse_size(kLayersKey, cut(text, '+'), kParallelSizeMax));
    topology.pp_layers.push_back(layers);
    if (topology.pp_layers.size() > kParallelSizeMax) {
      return fail(Code::kInvalid, "topology: pp_layers has more than {} stages", kParallelSizeMax);
    }
  }
  return {};
}

Result<void> parse_part(std::string_view part, Topology& topology) {
  std::string_view value = part;
  const std::string_view key = cut(value, '=');
  if (key == kLayersKey && !value.empty()) {
    return parse_layers(value, topology);
  }
  if (key == kSplitKey) {
    KVF_TRY(topology.cp_split, parse_cp_split(value));
    return {};
  }
  for (const SizeField& field : kSizeFields) {
    if (field.key == key) {
      KVF_TRY(topology.*field.field, parse_size(key, value, field.maximum));
      return {};
    }
  }
  return fail(Code::kInvalid,
              "topology: \"{}\" is unknown; write tp=4,dcp=4 with the keys tp, pp, cp, cp_split, dp, dcp, "
              "interleave, pp_layers",
              part.substr(0, 64));
}

}  // namespace

std::string_view to_string(CpSplit split) {
  switch (split) {
    case CpSplit::kNone:
      return "none";
    case CpSplit::kPages:
      return "pages";
    case CpSplit::kZigzag:
      return "zigzag";
  }
  return "?";
}

Result<CpSplit> parse_cp_split(std::string_view text) {
  for (const CpSplit split : {CpSplit::kNone, CpSplit::kPages, CpSplit::kZigzag}) {
    if (text == to_string(split)) {
      return split;
    }
  }
  return fail(Code::kInvalid, "cp_split \"{}\" is none of none, pages, zigzag", text.substr(0, 32));
}

RankIndex Topology::rank_index(const RankCoord& coord) const {
  return ((coord.dp * pp + coord.pp) * cp + coord.cp) * tp + coord.tp;
}

RankCoord Topology::coord(RankIndex index) const {
  RankCoord coord;
  coord.tp = index % tp;
  coord.cp = index / tp % cp;
  coord.pp = index / tp / cp % pp;
  coord.dp = index / tp / cp / pp;
  return coord;
}

Result<void> validate(const Topology& topology, const ModelGeometry& model) {
  std::string problems;
  for (const SizeField& size : kSizeFields) {
    const std::uint32_t value = topology.*size.field;
    if (value < 1 || value > size.maximum) {
      add_problem(problems, fmt::format("{} is {}, must be 1 to {}", size.key, value, size.maximum));
    }
  }
  if (const auto valid = validate(model); !valid) {
    add_problem(problems, valid.error().message);
  }
  if (!problems.empty()) {
    return fail(Code::kInvalid, "topology: {}", problems);
  }
  const std::uint64_t ranks = std::uint64_t{topology.tp} * topology.pp * topology.cp * topology.dp;
  if (ranks > kRanksMax) {
    add_problem(problems, fmt::format("tp*pp*cp*dp is {} ranks, at most {} are allowed", ranks, kRanksMax));
  }
  if (topology.pp > model.hidden_layers) {
    add_problem(problems,
                fmt::format("pp {} is more than the {} layers; lower pp", topology.pp, model.hidden_layers));
  }
  if (!topology.pp_layers.empty()) {
    const std::uint64_t layers =
        std::accumulate(topology.pp_layers.begin(), topology.pp_layers.end(), std::uint64_t{0});
    const bool has_empty = std::count(topology.pp_layers.begin(), topology.pp_layers.end(), 0u) > 0;
    if (topology.pp_layers.size() != topology.pp || layers != model.hidden_layers || has_empty) {
      add_problem(
          problems,
          fmt::format("pp_layers has {} stages with {} layers, must have pp {} non-empty stages with {} "
                      "layers",
                      topology.pp_layers.size(), layers, topology.pp, model.hidden_layers));
    }
  }
  if (topology.tp % topology.dcp != 0) {
    add_problem(problems, fmt::format("dcp {} must divide tp {}", topology.dcp, topology.tp));
  } else if (const std::uint32_t shards = topology.head_ranks(); model.attention != AttentionKind::kMla &&
                                                                 model.kv_heads % shards != 0 &&
                                                                 shards % model.kv_heads != 0) {
    add_problem(problems, fmt::format("{} KV heads neither divide nor replicate over tp/dcp {}/{}; change tp",
                                      model.kv_heads, topology.tp, topology.dcp));
  }
  for (const StateTensor& tensor : model.state) {
    const auto odd = std::find_if(tensor.blocks.begin(), tensor.blocks.end(),
                                  [&](std::uint32_t block) { return block % topology.tp != 0; });
    if (odd != tensor.blocks.end()) {
      add_problem(problems,
                  fmt::format("tp {} does not divide a {} state block of {} elements; choose a tp that does",
                              topology.tp, to_string(tensor.kind), *odd));
    }
  }
  if (!problems.empty()) {
    return fail(Code::kInvalid, "topology {} of model \"{}\": {}", to_string(topology), model.name, problems);
  }
  return {};
}

Result<Topology> parse_topology(std::string_view text) {
  if (text.ends_with(',') || text.ends_with('+')) {
    return fail(Code::kInvalid, "topology: \"{}\" ends in a separator", text.substr(0, 128));
  }
  Topology topology;
  std::vector<std::string_view> keys;
  std::string_view rest = text;
  do {
    const std::string_view part = cut(rest, ',');
    const std::string_view key = part.substr(0, part.find('='));
    if (std::find(keys.begin(), keys.end(), key) != keys.end()) {
      return fail(Code::kInvalid, "topology: {} is given twice", key.substr(0, 32));
    }
    keys.push_back(key);
    KVF_TRY_VOID(parse_part(part, topology));
  } while (!rest.empty());
  return topology;
}

std::string to_string(const Topology& topology) {
  const Topology standard;
  std::string text;
  for (const SizeField& size : kSizeFields) {
    if (size.key == "tp" || topology.*size.field != standard.*size.field) {
      text += fmt::format("{}{}={}", text.empty() ? "" : ",", size.key, topology.*size.field);
    }
  }
  if (topology.cp_split != standard.cp_split) {
    text += fmt::format(",{}={}", kSplitKey, to_string(topology.cp_split));
  }
  if (!topology.pp_layers.empty()) {
    text += fmt::format(",{}={}", kLayersKey, fmt::join(topology.pp_layers, "+"));
  }
  return text;
}

}  // namespace kvferry
