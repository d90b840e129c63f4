#include <fmt/ranges.h>

#include <array>

#include "common/model/geometry.h"

namespace kvferry {
namespace {

struct Preset {
  std::string_view name;
  AttentionKind attention;
  std::uint32_t layers;
  std::uint32_t kv_heads;
  std::uint32_t head_dim;  // latent_dim for MLA
  std::uint32_t rope_dim;
  std::uint32_t hidden_size;
  std::uint32_t draft_layers;
  std::uint32_t index_head_dim;
  std::uint32_t sliding_window;  // > 0: even layers slide, odd ones are full
};

constexpr AttentionKind kMha = AttentionKind::kMha;
constexpr AttentionKind kMla = AttentionKind::kMla;
constexpr std::array<Preset, 10> kPresets{{
    {"llama-3.1-8b", kMha, 32, 8, 128, 0, 4096, 0, 0, 0},
    {"llama-3.1-70b", kMha, 80, 8, 128, 0, 8192, 0, 0, 0},
    {"llama-3.1-405b", kMha, 126, 8, 128, 0, 16384, 0, 0, 0},
    {"qwen3-32b", kMha, 64, 8, 128, 0, 5120, 0, 0, 0},
    {"qwen3-235b-a22b", kMha, 94, 4, 128, 0, 4096, 0, 0, 0},
    {"glm-4.5", kMha, 92, 8, 128, 0, 5120, 1, 0, 0},
    {"gpt-oss-120b", kMha, 36, 8, 64, 0, 2880, 0, 0, 128},
    {"deepseek-v3", kMla, 61, 1, 512, 64, 7168, 1, 0, 0},
    {"kimi-k2", kMla, 61, 1, 512, 64, 7168, 0, 0, 0},
    {"deepseek-v3.2", kMla, 61, 1, 512, 64, 7168, 1, 128, 0},
}};

/// Layers with full attention, and those with recurrent state instead.
void split_layers(ModelGeometry& model, bool (*is_full)(std::uint32_t layer)) {
  for (std::uint32_t layer = 0; layer < model.hidden_layers; ++layer) {
    (is_full(layer) ? model.kv_layers : model.state_layers).push_back(layer);
  }
}

// 3 layers of gated delta net to one of full attention (preflight-spec 5).
ModelGeometry qwen3_next() {
  ModelGeometry model;
  model.name = "qwen3-next-80b-a3b";
  model.hidden_layers = 48;
  model.kv_heads = 2;
  model.head_dim = model.v_head_dim = 256;
  model.hidden_size = 2048;
  split_layers(model, [](std::uint32_t layer) { return layer % 4 == 3; });
  // Convolution inputs of q, k and v, each element with its last 3 inputs in bf16; 32 heads of 128 x 128
  // fp32.
  model.state = {{BufferKind::kConv, 1, {16 * 128, 16 * 128, 32 * 128}, 3 * 2},
                 {BufferKind::kRecurrent, 1, {32}, 128 * 128 * 4}};
  return model;
}

// Kimi delta attention with MLA in between.
ModelGeometry kimi_linear() {
  ModelGeometry model;
  model.name = "kimi-linear-48b-a3b";
  model.attention = AttentionKind::kMla;
  model.hidden_layers = 27;
  model.kv_heads = 1;
  model.latent_dim = 512;
  model.rope_dim = 64;
  model.hidden_size = 2304;
  split_layers(model, [](std::uint32_t layer) { return layer % 4 == 3 || layer == 26; });
  model.state = {{BufferKind::kConv, 3, {32 * 128, 32 * 128, 32 * 128}, 2},
                 {BufferKind::kRecurrent, 1, {32}, 128 * 128 * 4}};
  return model;
}

ModelGeometry expand(const Preset& preset) {
  ModelGeometry model;
  model.name = preset.name;
  model.attention = preset.attention;
  model.hidden_layers = preset.layers;
  model.kv_heads = preset.kv_heads;
  model.hidden_size = preset.hidden_size;
  model.draft_layers = preset.draft_layers;
  model.index_head_dim = preset.index_head_dim;
  model.sliding_window = preset.sliding_window;
  for (std::uint32_t layer = 0; layer < preset.layers; ++layer) {
    const bool slides = preset.sliding_window > 0 && layer % 2 == 0;
    (slides ? model.sliding_layers : model.kv_layers).push_back(layer);
  }
  if (preset.attention == kMla) {
    model.latent_dim = preset.head_dim;
    model.rope_dim = preset.rope_dim;
  } else {
    model.head_dim = preset.head_dim;
    model.v_head_dim = preset.head_dim;
  }
  return model;
}

}  // namespace

std::vector<std::string> preset_names() {
  std::vector<std::string> names;
  names.reserve(std::size(kPresets) + 2);
  for (const Preset& preset : kPresets) {
    names.emplace_back(preset.name);
  }
  for (const ModelGeometry& model : {qwen3_next(), kimi_linear()}) {
    names.push_back(model.name);
  }
  return names;
}

Result<ModelGeometry> preset_geometry(std::string_view name) {
  for (const Preset& preset : kPresets) {
    if (preset.name == name) {
      return expand(preset);
    }
  }
  for (const ModelGeometry& model : {qwen3_next(), kimi_linear()}) {
    if (model.name == name) {
      return model;
    }
  }
  return fail(Code::kNotFound, "model preset \"{}\" is unknown; the presets are {}", name.substr(0, 128),
              fmt::join(preset_names(), ", "));
}

}  // namespace kvferry
