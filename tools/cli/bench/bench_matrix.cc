#include "tools/cli/bench/bench_matrix.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "common/topology/topology.h"

namespace kvferry {
namespace {

constexpr std::uint64_t kMiB = 1u << 20;
constexpr std::uint32_t kLayers = 8;

struct NamedLayout {
  BenchLayout layout;
  std::optional<AttentionKind> only;  // none: every model
};

const std::vector<NamedLayout>& layouts() {
  static const std::vector<NamedLayout> all{
      {{"same", "tp=1", "tp=1"}, std::nullopt},
      {{"tp4-8", "tp=4", "tp=8"}, AttentionKind::kMha},
      {{"tp8-2", "tp=8", "tp=2"}, AttentionKind::kMha},
      {{"dcp1-4", "tp=1", "tp=4,dcp=4"}, AttentionKind::kMla},
      {{"dcp1-8", "tp=1", "tp=8,dcp=8"}, AttentionKind::kMla},
  };
  return all;
}

/// What a matrix has where the options give no lists.
struct Preset {
  std::string name;
  std::vector<std::pair<std::string, std::string>> groups;  // model and layout
  std::vector<BenchCell> cells;
  double memory_gib = 0;
  std::uint64_t batch_bytes = 0;
};

std::vector<BenchCell> product(const std::vector<std::uint64_t>& tokens,
                               const std::vector<std::uint32_t>& rooms) {
  std::vector<BenchCell> cells;
  for (const std::uint64_t size : tokens) {
    for (const std::uint32_t count : rooms) {
      cells.push_back({size, count});
    }
  }
  return cells;
}

std::vector<std::pair<std::string, std::string>> every_layout_of(const std::vector<std::string>& models) {
  std::vector<std::pair<std::string, std::string>> groups;
  for (const std::string& model : models) {
    for (const NamedLayout& layout : layouts()) {
      groups.emplace_back(model, layout.layout.name);
    }
  }
  return groups;
}

Preset preset_of(const BenchOptions& options) {
  if (options.quick) {
    return {
        "quick", {{"deepseek-v3", "same"}, {"deepseek-v3", "dcp1-4"}}, {{64, 1}, {8192, 1}}, 1, 64 * kMiB};
  }
  if (options.full) {
    return {"full", every_layout_of({"deepseek-v3", "llama-3.1-70b", "qwen3-235b-a22b"}),
            product({64, 1024, 8192, 32768, 131072}, {1, 16, 256}), 5, 512 * kMiB};
  }
  return {"default",
          {{"deepseek-v3", "same"}, {"deepseek-v3", "dcp1-4"}, {"llama-3.1-70b", "tp4-8"}},
          {{64, 1}, {64, 16}, {1024, 16}, {32768, 1}},
          5,
          384 * kMiB};
}

template <class T>
std::vector<T> distinct(std::vector<T> values) {
  std::vector<T> out;
  for (const T& value : values) {
    if (std::find(out.begin(), out.end(), value) == out.end()) {
      out.push_back(value);
    }
  }
  return out;
}

// A list of the options stands for that of the preset, in every combination with the other one.
std::vector<std::pair<std::string, std::string>> groups_of(const BenchOptions& options,
                                                           const Preset& preset) {
  if (options.models.empty() && options.layouts.empty()) {
    return preset.groups;
  }
  std::vector<std::string> models = options.models;
  std::vector<std::string> names = options.layouts;
  for (const auto& [model, layout] : preset.groups) {
    if (options.models.empty()) {
      models.push_back(model);
    }
    if (options.layouts.empty()) {
      names.push_back(layout);
    }
  }
  std::vector<std::pair<std::string, std::string>> groups;
  for (const std::string& model : distinct(models)) {
    for (const std::string& name : distinct(names)) {
      groups.emplace_back(model, name);
    }
  }
  return groups;
}

std::vector<BenchCell> cells_of(const BenchOptions& options, const Preset& preset) {
  if (options.tokens.empty() && options.rooms.empty()) {
    return preset.cells;
  }
  std::vector<std::uint64_t> tokens;
  std::vector<std::uint32_t> rooms;
  for (const BenchCell& cell : preset.cells) {
    tokens.push_back(cell.tokens);
    rooms.push_back(cell.rooms);
  }
  return product(distinct(options.tokens.empty() ? tokens : options.tokens),
                 distinct(options.rooms.empty() ? rooms : options.rooms));
}

Result<NamedLayout> find_layout(const std::string& name) {
  std::vector<std::string> names;
  for (const NamedLayout& entry : layouts()) {
    if (entry.layout.name == name) {
      return entry;
    }
    names.push_back(entry.layout.name);
  }
  return fail(Code::kNotFound, "--layout {} is unknown; there are {}", name, fmt::join(names, ", "));
}

Result<BenchGroup> group_of(const std::string& name, const BenchLayout& layout, std::uint32_t layers) {
  auto model = load_geometry(name);
  if (!model) {
    return fail(model.error().code, "--model: {}", model.error().message);
  }
  BenchGroup group;
  group.model = name;
  group.layout = layout;
  group.layers_of_model = model->hidden_layers;
  group.layers = std::min(layers, model->hidden_layers);
  if (group.layers < model->hidden_layers) {
    auto text = cut_model(*model, group.layers);
    if (!text) {
      return fail(text.error().code, "--model {} with --layers {}: {}", name, layers, text.error().message);
    }
    group.model_text = *std::move(text);
    KVF_TRY(model, geometry_from_hf_config(group.model_text));
  }
  group.attention = model->attention;
  group.token_bytes = model->bytes_per_token();
  return group;
}

// The mixed cell has so many tokens that the model is cut further where the memory asks for it.
Result<BenchGroup> mix_group(const BenchMatrix& matrix, const std::string& model, std::uint32_t layers) {
  constexpr BenchCell kMix{1024, 256, 131072};
  constexpr std::uint64_t kTokens = kMix.tokens * kMix.rooms + kMix.beside;
  KVF_TRY(const NamedLayout same, find_layout("same"));
  KVF_TRY(BenchGroup one, group_of(model, same.layout, 1));
  const std::uint64_t fit = matrix.memory / (2 * kTokens * one.token_bytes);
  KVF_TRY(BenchGroup group, group_of(model, same.layout,
                                     static_cast<std::uint32_t>(std::clamp<std::uint64_t>(fit, 1, layers))));
  group.cells = {kMix};
  return group;
}

}  // namespace

Result<std::string> cut_model(const ModelGeometry& model, std::uint32_t layers) {
  if (!model.sliding_layers.empty() || !model.state_layers.empty()) {
    return fail(Code::kInvalid,
                "{} has layers of several kinds, and a part of them would stand for no model; give --layers "
                "{} or another model",
                model.name, model.hidden_layers);
  }
  nlohmann::json config{{"model_type", model.name},
                        {"num_hidden_layers", layers},
                        {"hidden_size", model.hidden_size},
                        {"torch_dtype", to_string(model.dtype)}};
  if (model.attention == AttentionKind::kMla) {
    config["kv_lora_rank"] = model.latent_dim;
    config["qk_rope_head_dim"] = model.rope_dim;
    if (model.index_head_dim > 0) {
      config["index_topk"] = 2048;
      config["index_head_dim"] = model.index_head_dim;
    }
  } else {
    config["num_attention_heads"] = model.kv_heads;
    config["num_key_value_heads"] = model.kv_heads;
    config["head_dim"] = model.head_dim;
    config["v_head_dim"] = model.v_head_dim;
  }
  return config.dump(2) + "\n";
}

Result<BenchMatrix> bench_matrix(const BenchOptions& options) {
  if (options.quick && options.full) {
    return fail(Code::kInvalid, "--quick and --full exclude each other");
  }
  const Preset preset = preset_of(options);
  BenchMatrix matrix;
  const bool custom = !options.models.empty() || !options.layouts.empty() || !options.tokens.empty() ||
                      !options.rooms.empty() || options.layers > 0;
  matrix.name = custom ? "custom" : preset.name;
  matrix.fabrics = distinct(options.fabrics.empty() ? std::vector<std::string>{"shm", "tcp", "ucx", "ucx-tcp"}
                                                    : options.fabrics);
  matrix.rounds = options.rounds > 0 ? options.rounds : 5;
  const double gib = options.memory_gib > 0 ? options.memory_gib : preset.memory_gib;
  matrix.memory = static_cast<std::uint64_t>(gib * 1024) * kMiB;
  matrix.batch_bytes = preset.batch_bytes;
  const std::uint32_t layers = options.layers > 0 ? options.layers : kLayers;
  const auto groups = groups_of(options, preset);
  for (const auto& [model, name] : groups) {
    KVF_TRY(const NamedLayout layout, find_layout(name));
    KVF_TRY(BenchGroup group, group_of(model, layout.layout, layers));
    if (layout.only && *layout.only != group.attention) {
      if (!options.layouts.empty()) {
        matrix.left_out.push_back(fmt::format("{} with --layout {}: that layout is for {} models", model,
                                              name,
                                              *layout.only == AttentionKind::kMla ? "MLA" : "GQA and MHA"));
      }
      continue;
    }
    group.cells = cells_of(options, preset);
    matrix.groups.push_back(std::move(group));
  }
  if (options.mix || options.full) {
    KVF_TRY(BenchGroup group, mix_group(matrix, groups.front().first, layers));
    matrix.groups.push_back(std::move(group));
  }
  if (matrix.groups.empty()) {
    return fail(Code::kInvalid, "nothing to run: {}", fmt::join(matrix.left_out, "; "));
  }
  return matrix;
}

}  // namespace kvferry
