#include <unistd.h>

#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>

#include "common/model/geometry.h"

namespace kvferry {
namespace {

using Catch::Matchers::Contains;

struct Expected {
  const char* name;
  std::size_t layers;
  std::uint32_t heads;
  std::uint32_t head_or_latent;
  std::uint32_t hidden;
  std::uint64_t layer_bf16;
  std::uint64_t layer_fp8;
  std::uint64_t token_bf16;
  std::uint64_t token_fp8;
};

std::string error_of(std::string_view json) {
  const auto model = geometry_from_hf_config(json);
  return model ? "" : model.error().message;
}

}  // namespace

TEST_CASE("the ten presets have the published layers, heads and bytes per token") {
  const Expected all[] = {
      {"llama-3.1-8b", 32, 8, 128, 4096, 4096, 2048, 131072, 65536},
      {"llama-3.1-70b", 80, 8, 128, 8192, 4096, 2048, 327680, 163840},
      {"llama-3.1-405b", 126, 8, 128, 16384, 4096, 2048, 516096, 258048},
      {"qwen3-32b", 64, 8, 128, 5120, 4096, 2048, 262144, 131072},
      {"qwen3-235b-a22b", 94, 4, 128, 4096, 2048, 1024, 192512, 96256},
      {"glm-4.5", 92, 8, 128, 5120, 4096, 2048, 376832, 188416},
      {"gpt-oss-120b", 36, 8, 64, 2880, 2048, 1024, 73728, 36864},
      {"deepseek-v3", 61, 1, 512 + 64, 7168, 1152, 576, 70272, 35136},
      {"kimi-k2", 61, 1, 512 + 64, 7168, 1152, 576, 70272, 35136},
      {"deepseek-v3.2", 61, 1, 512 + 64, 7168, 1152 + 132, 656 + 132, 78324, 48068},
  };
  CHECK(preset_names().size() == 12);  // with the two linear hybrids below
  for (const Expected& expected : all) {
    INFO(expected.name);
    auto model = preset_geometry(expected.name);
    REQUIRE(model);
    CHECK(validate(*model));
    CHECK(model->hidden_layers == expected.layers);
    CHECK(model->cached_layers().size() == expected.layers);
    CHECK(model->kv_heads == expected.heads);
    CHECK(model->head_dim + model->latent_dim + model->rope_dim == expected.head_or_latent);
    CHECK(model->hidden_size == expected.hidden);
    CHECK(model->bytes_per_token_layer() == expected.layer_bf16);
    CHECK(model->bytes_per_token() == expected.token_bf16);
    model->dtype = Dtype::kFp8E4m3;
    CHECK(model->bytes_per_token_layer() == expected.layer_fp8);
    CHECK(model->bytes_per_token() == expected.token_fp8);
  }
}

TEST_CASE("gpt-oss lists full and sliding layers, half each") {
  const auto model = preset_geometry("gpt-oss-120b");
  REQUIRE(model);
  CHECK(model->kv_layers.size() == 18);
  CHECK(model->sliding_layers.size() == 18);
  CHECK(model->sliding_window == 128);
  CHECK(model->kv_layers.size() * model->bytes_per_token_layer() == 36864);
}

TEST_CASE("DeepSeek-V3.2 has index rows and the scaled fp8 latent") {
  auto model = preset_geometry("deepseek-v3.2");
  REQUIRE(model);
  CHECK(model->index_bytes() == 132);
  CHECK(model->head_bytes(BufferKind::kLatent) == 1152);
  model->dtype = Dtype::kFp8E4m3;
  CHECK(model->head_bytes(BufferKind::kLatent) == 656);
  CHECK(preset_geometry("deepseek-v3")->index_bytes() == 0);
}

TEST_CASE("an unknown preset names the known ones") {
  const auto model = preset_geometry("llama-9");
  REQUIRE_FALSE(model);
  CHECK_THAT(model.error().message, Contains("llama-9") && Contains("kimi-k2") && Contains("gpt-oss-120b"));
}

TEST_CASE("dtype, attention and buffer names read back, and unknown ones are refused") {
  for (const Dtype dtype :
       {Dtype::kBf16, Dtype::kFp16, Dtype::kFp8E4m3, Dtype::kFp8E5m2, Dtype::kFp32, Dtype::kInt8}) {
    CHECK(parse_dtype(to_string(dtype)).value() == dtype);
  }
  CHECK(parse_dtype("bfloat16").value() == Dtype::kBf16);
  CHECK(parse_dtype("half").value() == Dtype::kFp16);
  CHECK(parse_dtype("float32").value() == Dtype::kFp32);
  CHECK_FALSE(parse_dtype("auto"));
  CHECK_FALSE(parse_dtype("BF16"));
  CHECK(parse_attention_kind("mla").value() == AttentionKind::kMla);
  CHECK(parse_attention_kind("mha").value() == AttentionKind::kMha);
  CHECK_FALSE(parse_attention_kind(""));
  for (const BufferKind kind : {BufferKind::kKey, BufferKind::kValue, BufferKind::kLatent}) {
    CHECK(parse_buffer_kind(to_string(kind)).value() == kind);
  }
  CHECK_FALSE(parse_buffer_kind("index"));
}

TEST_CASE("a GQA config.json becomes its geometry") {
  const auto model = geometry_from_hf_config(R"({"model_type": "llama", "num_hidden_layers": 80,
      "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192, "torch_dtype": "bfloat16"})");
  REQUIRE(model);
  CHECK(model->name == "llama");
  CHECK(model->head_dim == 128);
  CHECK(model->v_head_dim == 128);
  CHECK(model->bytes_per_token() == 327680);
}

TEST_CASE("an MLA config.json becomes its geometry, with or without the DSA index") {
  const std::string common =
      R"("model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128,
      "num_key_value_heads": 128, "hidden_size": 7168, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
      "num_nextn_predict_layers": 1)";
  const auto plain = geometry_from_hf_config("{" + common + "}");
  REQUIRE(plain);
  CHECK(plain->attention == AttentionKind::kMla);
  CHECK(plain->kv_heads == 1);
  CHECK(plain->draft_layers == 1);
  CHECK(plain->bytes_per_token() == 70272);
  const auto sparse =
      geometry_from_hf_config("{" + common + R"(, "index_topk": 2048, "index_head_dim": 128})");
  REQUIRE(sparse);
  CHECK(sparse->bytes_per_token() == 78324);
}

TEST_CASE("text_config wins over the outer object, and layer_types split full from sliding layers") {
  const auto model = geometry_from_hf_config(R"({"num_hidden_layers": 99, "text_config": {"model_type": "x",
      "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "v_head_dim": 32,
      "hidden_size": 512, "sliding_window": 128, "dtype": "float16",
      "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]}})");
  REQUIRE(model);
  CHECK(model->hidden_layers == 4);
  CHECK(model->kv_layers == std::vector<std::uint32_t>{1, 3});
  CHECK(model->sliding_layers == std::vector<std::uint32_t>{0, 2});
  CHECK(model->bytes_per_token_layer() == 2 * (64 + 32) * 2);
  CHECK(model->dtype == Dtype::kFp16);
}

TEST_CASE("a config.json with several faults names all of them in one message") {
  const std::string error = error_of(R"({"model_type": "llama", "num_hidden_layers": "many",
      "num_attention_heads": -4, "num_key_value_heads": 2.5, "torch_dtype": "auto"})");
  CHECK_THAT(error, Contains("num_hidden_layers is string") && Contains("num_attention_heads is -4") &&
                        Contains("num_key_value_heads is number") && Contains("hidden_size is missing") &&
                        Contains("auto"));
}

// preflight-spec 5: bytes of one request's state at TP 1, and of one token of the full-attention layers.
TEST_CASE("linear hybrids have the published state, as presets and from config.json") {
  const auto state_bytes = [](const ModelGeometry& model) {
    std::uint64_t bytes = 0;
    for (const StateTensor& tensor : model.state) {
      bytes += tensor.outer * tensor.elements() * tensor.element_bytes;
    }
    return bytes;
  };
  const auto qwen = preset_geometry("qwen3-next-80b-a3b");
  REQUIRE(qwen);
  CHECK(qwen->state_layers.size() == 36);
  CHECK(qwen->kv_layers.size() == 12);
  CHECK(state_bytes(*qwen) == 49152 + 2097152);
  CHECK(qwen->bytes_per_token_layer() == 2048);
  const auto kimi = preset_geometry("kimi-linear-48b-a3b");
  REQUIRE(kimi);
  CHECK(kimi->kv_layers == std::vector<std::uint32_t>{3, 7, 11, 15, 19, 23, 26});
  CHECK(state_bytes(*kimi) == 73728 + 2097152);
  const auto read = geometry_from_hf_config(R"({"model_type": "qwen3_next", "num_hidden_layers": 48,
      "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
      "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
      "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4})");
  REQUIRE(read);
  CHECK(read->state_layers == qwen->state_layers);
  CHECK(read->state == qwen->state);
  const auto read_kimi = geometry_from_hf_config(R"({"model_type": "kimi_linear", "num_hidden_layers": 27,
      "hidden_size": 2304, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 32,
      "linear_attn_config": {"full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "num_heads": 32,
      "head_dim": 128, "short_conv_kernel_size": 4}})");
  REQUIRE(read_kimi);
  CHECK(read_kimi->kv_layers == kimi->kv_layers);
  CHECK(read_kimi->state == kimi->state);
}

TEST_CASE("models whose KV cannot be described are refused with the reason") {
  const std::string base = R"("num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
      "hidden_size": 64)";
  CHECK(error_of("{" + base + "}").empty());
  CHECK_THAT(error_of("{" + base + R"(, "linear_attn_config": {"x": 1}})"), Contains("full_attn_layers"));
  CHECK_THAT(error_of("{" + base + R"(, "layer_types": ["linear_attention", "full_attention"]})"),
             Contains("linear_num_key_heads is missing") && Contains("linear_conv_kernel_dim is missing"));
  CHECK_THAT(error_of("{" + base + R"(, "layer_types": ["mamba", "full_attention"]})"),
             Contains("layer_types[0]") && Contains("mamba"));
  CHECK_THAT(error_of("{" + base + R"(, "compress_ratios": [0, 4]})"), Contains("compress_ratios"));
  CHECK_THAT(error_of("{" + base + R"(, "is_encoder_decoder": true})"), Contains("encoder"));
  CHECK(error_of("{" + base + R"(, "is_encoder_decoder": false, "num_kv_shared_layers": 0})").empty());
  CHECK_THAT(error_of("{" + base + R"(, "layer_types": ["full_attention"]})"), Contains("1 entries"));
}

TEST_CASE("hostile config.json texts are refused and crash nothing") {
  const std::string base = R"({"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, )";
  for (const char* number :
       {"0", "-1", "4294967297", "18446744073709551615", "1e400", "9223372036854775808",
        "-9223372036854775808", "99999999999999999999999", "true", "null", "[]", "{}", "\"\"", "2.0"}) {
    INFO(number);
    CHECK_FALSE(geometry_from_hf_config(base + R"("num_hidden_layers": )" + number + "}"));
  }
  CHECK_FALSE(geometry_from_hf_config(""));
  CHECK_FALSE(geometry_from_hf_config("[1, 2]"));
  CHECK_FALSE(geometry_from_hf_config("{\"a\": \xff}"));
  CHECK_FALSE(geometry_from_hf_config(base));
  CHECK_FALSE(geometry_from_hf_config(R"({"text_config": 3})"));
  CHECK_THAT(error_of(std::string(1000000, '[')), Contains("nests deeper"));
  CHECK_THAT(error_of("{\"a\": " + std::string(100, '[') + std::string(100, ']') + "}"),
             Contains("nests deeper"));
  CHECK_THAT(error_of(std::string(9u << 20, ' ')), Contains("bytes"));
  CHECK_FALSE(
      geometry_from_hf_config(R"({"num_hidden_layers": 2, "num_attention_heads": 3, "hidden_size": 64})"));
  // Brackets and quotes inside strings are not nesting.
  CHECK(error_of(base + R"("num_hidden_layers": 2, "note": ")" + std::string(200, '[') + R"(\"["})").empty());
}

TEST_CASE("a path to a config.json or its folder loads, and a missing one lists the presets") {
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / ("kvferry-model-" + std::to_string(::getpid()));
  std::filesystem::create_directory(folder);
  std::ofstream(folder / "config.json") << R"({"model_type": "tiny", "num_hidden_layers": 2,
      "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64})";
  CHECK(load_geometry(folder.string()).value().name == "tiny");
  CHECK(load_geometry((folder / "config.json").string()).value().head_dim == 16);
  std::filesystem::remove_all(folder);
  CHECK(load_geometry("kimi-k2").value().latent_dim == 512);
  const auto missing = load_geometry(folder.string());
  REQUIRE_FALSE(missing);
  CHECK_THAT(missing.error().message, Contains("kimi-k2") && Contains("config.json"));
}

TEST_CASE("a geometry from outside with fields out of range is refused, all at once") {
  ModelGeometry model = *preset_geometry("llama-3.1-8b");
  CHECK(validate(model));
  model.kv_heads = 0xFFFFFFFFu;
  model.head_dim = 0;
  model.kv_layers = {5, 5};
  const auto valid = validate(model);
  REQUIRE_FALSE(valid);
  CHECK_THAT(valid.error().message,
             Contains("kv_heads is 4294967295") && Contains("head_dim is 0") && Contains("kv_layers[1]"));
  model = *preset_geometry("kimi-k2");
  model.kv_layers = {61};
  CHECK_FALSE(validate(model));
  model.kv_layers.clear();
  CHECK_FALSE(validate(model));
}

}  // namespace kvferry
