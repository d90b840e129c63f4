// Reading a Hugging Face config.json. The file may come from anywhere, so it is read as hostile: size and
// nesting are limited before parsing, every field's type and range is checked, and all complaints are
// collected so that a person fixes one list.

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "common/model/geometry.h"

namespace kvferry {
namespace {

using Json = nlohmann::json;

constexpr std::size_t kConfigBytesMax = 8u << 20;
constexpr int kNestingMax = 64;
constexpr std::uint32_t kLayersMax = 4096;
constexpr std::uint32_t kFieldMax = 1u << 24;

// Fields whose presence means that KV is not "so many heads for every token of every layer", and why.
struct Unsupported {
  std::string_view field;
  std::string_view reason;
};
constexpr std::array<Unsupported, 10> kUnsupported{{
    {"hybrid_override_pattern", "Mamba layers keep a recurrent state, which is not moved"},
    {"layers_block_type", "layers of mixed kinds keep a recurrent state, which is not moved"},
    {"attn_layer_period", "Mamba layers keep a recurrent state, which is not moved"},
    {"ssm_cfg", "Mamba layers keep a recurrent state, which is not moved"},
    {"compress_ratios", "compressed-attention KV has its own page layout, which is not described"},
    {"compression_ratios", "compressed-attention KV has its own page layout, which is not described"},
    {"num_kv_shared_layers", "layers that share KV are not described"},
    {"cross_attention_layers", "cross-attention layers keep KV of the image, which is not moved"},
    {"block_configs", "layers with different head counts are not described"},
    {"global_head_dim", "layers with different head sizes are not described"},
}};

// Brackets outside strings, so that a file of a million '[' is refused before the parser sees it.
bool nests_too_deep(std::string_view text) {
  int depth = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') {
        ++i;
      } else if (c == '"') {
        in_string = false;
      }
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      if (++depth > kNestingMax) {
        return true;
      }
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return false;
}

class Reader {
 public:
  explicit Reader(const Json& config) : config_(config) {}

  template <class... Args>
  void complain(fmt::format_string<Args...> format, Args&&... args) {
    problems_.push_back(fmt::format(format, std::forward<Args>(args)...));
  }
  const std::vector<std::string>& problems() const { return problems_; }

  /// The value of `field`; null counts as absent.
  const Json* find(std::string_view field) const {
    const auto found = config_.find(field);
    return found == config_.end() || found->is_null() ? nullptr : &*found;
  }
  /// False, 0, "", [] and {} also mean that a feature is off.
  bool switched_on(std::string_view field) const {
    const Json* value = find(field);
    if (value == nullptr || (value->is_boolean() && !value->get<bool>()) ||
        (value->is_number() && *value == 0)) {
      return false;
    }
    if (value->is_string()) {
      return !value->get_ref<const std::string&>().empty();
    }
    return !value->is_structured() || !value->empty();
  }

  std::optional<std::uint32_t> number(std::string_view field, std::uint32_t low, std::uint32_t high) {
    const Json* value = find(field);
    if (value == nullptr) {
      return std::nullopt;
    }
    if (!value->is_number_integer()) {
      complain("{} is {}, must be an integer", field, value->type_name());
      return std::nullopt;
    }
    // Unsigned values above int64 are their own JSON type, so both signs are compared without conversion.
    const bool fits = value->is_number_unsigned()
                          ? value->get<std::uint64_t>() >= low && value->get<std::uint64_t>() <= high
                          : value->get<std::int64_t>() >= std::int64_t{low} &&
                                value->get<std::int64_t>() <= std::int64_t{high};
    if (!fits) {
      complain("{} is {}, must be {} to {}", field, value->dump(), low, high);
      return std::nullopt;
    }
    return value->get<std::uint32_t>();
  }
  std::uint32_t need(std::string_view field, std::uint32_t low, std::uint32_t high) {
    if (find(field) == nullptr) {
      complain("{} is missing", field);
      return 0;
    }
    return number(field, low, high).value_or(0);
  }
  std::optional<std::string> text(std::string_view field) {
    const Json* value = find(field);
    if (value == nullptr) {
      return std::nullopt;
    }
    if (!value->is_string()) {
      complain("{} is {}, must be a string", field, value->type_name());
      return std::nullopt;
    }
    return value->get_ref<const std::string&>().substr(0, 256);
  }

 private:
  const Json& config_;
  std::vector<std::string> problems_;
};

void refuse_unsupported(Reader& reader) {
  for (const Unsupported& item : kUnsupported) {
    if (reader.switched_on(item.field)) {
      reader.complain("{} is set: {}", item.field, item.reason);
    }
  }
  if (reader.switched_on("is_encoder_decoder")) {
    reader.complain("is_encoder_decoder is true: encoder KV is not moved");
  }
}

// Kimi's configuration numbers its layers from 1.
void read_linear_layers(Reader& reader, const Json& linear, ModelGeometry& model) {
  const auto full = linear.is_object() ? linear.find("full_attn_layers") : linear.end();
  if (!linear.is_object() || full == linear.end() || !full->is_array()) {
    reader.complain(
        "linear_attn_config.full_attn_layers is missing, must list the layers with full attention");
    return;
  }
  for (std::uint32_t layer = 0; layer < model.hidden_layers; ++layer) {
    const bool is_full = std::find(full->begin(), full->end(), Json(layer + 1)) != full->end();
    (is_full ? model.kv_layers : model.state_layers).push_back(layer);
  }
}

// Recurrent state of the linear layers (preflight-spec 5): gated delta net as in Qwen3-Next, or Kimi delta
// attention. Convolution inputs are kept in bf16 and the state in fp32, whatever the KV dtype.
void read_state(Reader& reader, ModelGeometry& model) {
  constexpr std::uint32_t kHeads = 4096;
  constexpr std::uint32_t kDim = 4096;
  const Json* linear = reader.find("linear_attn_config");
  if (linear != nullptr && linear->is_object()) {
    Reader inner(*linear);
    const std::uint32_t heads = inner.need("num_heads", 1, kHeads);
    const std::uint32_t dim = inner.need("head_dim", 1, kDim);
    const std::uint32_t kernel = inner.need("short_conv_kernel_size", 2, 64);
    for (const std::string& problem : inner.problems()) {
      reader.complain("linear_attn_config.{}", problem);
    }
    if (inner.problems().empty()) {
      model.state = {{BufferKind::kConv, kernel - 1, {heads * dim, heads * dim, heads * dim}, 2},
                     {BufferKind::kRecurrent, 1, {heads}, dim * dim * 4}};
    }
    return;
  }
  const std::uint32_t key_heads = reader.need("linear_num_key_heads", 1, kHeads);
  const std::uint32_t value_heads = reader.need("linear_num_value_heads", 1, kHeads);
  const std::uint32_t key_dim = reader.need("linear_key_head_dim", 1, kDim);
  const std::uint32_t value_dim = reader.need("linear_value_head_dim", 1, kDim);
  const std::uint32_t kernel = reader.need("linear_conv_kernel_dim", 2, 64);
  if (reader.problems().empty()) {
    model.state = {{BufferKind::kConv,
                    1,
                    {key_heads * key_dim, key_heads * key_dim, value_heads * value_dim},
                    (kernel - 1) * 2},
                   {BufferKind::kRecurrent, 1, {value_heads}, value_dim * key_dim * 4}};
  }
}

// Without layer_types every layer counts as full, even where sliding_window is set: moving every token is a
// superset of any window.
void read_layer_kinds(Reader& reader, ModelGeometry& model) {
  const Json* kinds = reader.find("layer_types");
  if (kinds == nullptr && reader.switched_on("full_attention_interval")) {
    const std::uint32_t interval = reader.number("full_attention_interval", 1, kLayersMax).value_or(1);
    for (std::uint32_t layer = 0; layer < model.hidden_layers; ++layer) {
      ((layer + 1) % interval == 0 ? model.kv_layers : model.state_layers).push_back(layer);
    }
    return;
  }
  if (const Json* linear = reader.find("linear_attn_config"); kinds == nullptr && linear != nullptr) {
    read_linear_layers(reader, *linear, model);
    return;
  }
  if (kinds == nullptr) {
    for (std::uint32_t layer = 0; layer < model.hidden_layers; ++layer) {
      model.kv_layers.push_back(layer);
    }
    return;
  }
  if (!kinds->is_array() || kinds->size() != model.hidden_layers) {
    reader.complain("layer_types is {} with {} entries, must be an array of num_hidden_layers {} strings",
                    kinds->type_name(), kinds->size(), model.hidden_layers);
    return;
  }
  for (std::uint32_t layer = 0; layer < model.hidden_layers; ++layer) {
    const Json& kind = (*kinds)[layer];
    const std::string name = kind.is_string() ? kind.get_ref<const std::string&>().substr(0, 64) : "";
    if (name == "full_attention" || name == "attention" || name == "chunked_attention") {
      model.kv_layers.push_back(layer);
    } else if (name == "sliding_attention") {
      model.sliding_layers.push_back(layer);
    } else if (name == "linear_attention") {
      model.state_layers.push_back(layer);
    } else {
      reader.complain(
          "layer_types[{}] is \"{}\": only full_attention, sliding_attention and linear_attention are known",
          layer, name);
      return;
    }
  }
  if (!model.sliding_layers.empty()) {
    model.sliding_window = reader.need("sliding_window", 1, kFieldMax);
  }
}

void read_latent(Reader& reader, ModelGeometry& model) {
  model.attention = AttentionKind::kMla;
  model.kv_heads = 1;
  model.latent_dim = reader.need("kv_lora_rank", 1, 65536);
  model.rope_dim = reader.need("qk_rope_head_dim", 0, 65536);
  if (reader.find("index_topk") != nullptr) {
    model.index_head_dim = reader.need("index_head_dim", 1, 65536);
  }
}

void read_heads(Reader& reader, ModelGeometry& model) {
  model.attention = AttentionKind::kMha;
  const std::uint32_t query_heads = reader.need("num_attention_heads", 1, 65536);
  // Old configurations without grouping have as many KV heads as query heads.
  model.kv_heads = reader.find("num_key_value_heads") == nullptr
                       ? query_heads
                       : reader.number("num_key_value_heads", 1, 4096).value_or(0);
  if (reader.find("head_dim") != nullptr) {
    model.head_dim = reader.number("head_dim", 1, 65536).value_or(0);
  } else if (query_heads > 0 && model.hidden_size > 0) {
    if (model.hidden_size % query_heads != 0) {
      reader.complain("head_dim is missing and hidden_size {} is not a multiple of num_attention_heads {}",
                      model.hidden_size, query_heads);
    }
    model.head_dim = model.hidden_size / query_heads;
  }
  model.v_head_dim = reader.number("v_head_dim", 1, 65536).value_or(model.head_dim);
}

void read_dtype(Reader& reader, ModelGeometry& model) {
  const auto name = reader.find("torch_dtype") != nullptr ? reader.text("torch_dtype") : reader.text("dtype");
  if (!name) {
    return;
  }
  if (const auto dtype = parse_dtype(*name)) {
    model.dtype = *dtype;
  } else {
    reader.complain("torch_dtype: {}", dtype.error().message);
  }
}

Result<std::string> read_file(const std::string& path) {
  std::error_code error;
  const auto size = std::filesystem::file_size(path, error);
  if (error) {
    return fail(Code::kIo, "model config {}: {}", path, error.message());
  }
  if (size > kConfigBytesMax) {
    return fail(Code::kInvalid, "model config {} has {} bytes, at most {} are read", path, size,
                kConfigBytesMax);
  }
  std::ifstream file(path, std::ios::binary);
  std::string text(static_cast<std::size_t>(size), '\0');
  if (!file.read(text.data(), static_cast<std::streamsize>(size))) {
    return fail(Code::kIo, "model config {}: cannot be read", path);
  }
  return text;
}

}  // namespace

Result<ModelGeometry> geometry_from_hf_config(std::string_view json_text) {
  if (json_text.size() > kConfigBytesMax) {
    return fail(Code::kInvalid, "config.json has {} bytes, at most {} are read", json_text.size(),
                kConfigBytesMax);
  }
  if (nests_too_deep(json_text)) {
    return fail(Code::kInvalid, "config.json nests deeper than {} levels", kNestingMax);
  }
  const Json root = Json::parse(json_text, nullptr, false);
  if (!root.is_object()) {
    return fail(Code::kInvalid, "config.json is not a JSON object");
  }
  const auto inner = root.find("text_config");
  const bool nested = inner != root.end() && inner->is_object();
  Reader reader(nested ? *inner : root);

  ModelGeometry model;
  if (inner != root.end() && !inner->is_null() && !nested) {
    reader.complain("text_config is {}, must be an object", inner->type_name());
  }
  refuse_unsupported(reader);
  model.name = reader.text("model_type").value_or("");
  if (model.name.empty()) {
    model.name = reader.text("_name_or_path").value_or("config.json");
  }
  model.hidden_layers = reader.need("num_hidden_layers", 1, kLayersMax);
  model.hidden_size = reader.need("hidden_size", 1, kFieldMax);
  model.draft_layers = reader.number("num_nextn_predict_layers", 0, kLayersMax).value_or(0);
  if (reader.find("kv_lora_rank") != nullptr) {
    read_latent(reader, model);
  } else {
    read_heads(reader, model);
  }
  if (model.hidden_layers > 0) {
    read_layer_kinds(reader, model);
  }
  if (!model.state_layers.empty()) {
    read_state(reader, model);
  }
  read_dtype(reader, model);
  if (!reader.problems().empty()) {
    return fail(Code::kInvalid, "config.json of model \"{}\": {}", model.name,
                fmt::join(reader.problems(), "; "));
  }
  KVF_TRY_VOID(validate(model));
  return model;
}

Result<ModelGeometry> load_geometry(std::string_view preset_or_path) {
  auto preset = preset_geometry(preset_or_path);
  if (preset) {
    return preset;
  }
  std::error_code error;
  std::filesystem::path path(preset_or_path);
  if (std::filesystem::is_directory(path, error)) {
    path /= "config.json";
  }
  if (!std::filesystem::is_regular_file(path, error)) {
    return fail(Code::kNotFound, "{}, and there is no config.json at that path", preset.error().message);
  }
  KVF_TRY(const std::string text, read_file(path.string()));
  auto model = geometry_from_hf_config(text);
  if (!model) {
    return fail(model.error().code, "{}: {}", path.string(), model.error().message);
  }
  return model;
}

}  // namespace kvferry
