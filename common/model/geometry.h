#pragma once
// What one model's KV cache looks like, before any parallel layout is applied: which layers own KV, of which
// kind, how many heads, how many bytes a row (one token of one buffer) takes. From a preset or from a Hugging
// Face config.json. Pure values, no I/O.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/result.h"

namespace kvferry {

enum class Dtype : std::uint8_t { kBf16, kFp16, kFp8E4m3, kFp8E5m2, kFp32, kInt8 };
std::string_view to_string(Dtype dtype);           // "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "fp32", "int8"
Result<Dtype> parse_dtype(std::string_view text);  // also "bfloat16", "float16", "half", "float32"
std::uint32_t dtype_bytes(Dtype dtype);

enum class AttentionKind : std::uint8_t { kMha, kMla };  // kMha covers MHA, GQA and MQA
std::string_view to_string(AttentionKind kind);          // "mha", "mla"
Result<AttentionKind> parse_attention_kind(std::string_view text);

/// What one buffer of a pool holds for its layer.
enum class BufferKind : std::uint8_t {
  kKey = 0,
  kValue = 1,
  kLatent = 2,
  kIndexKey = 3,    // DSA indexer keys
  kIndexScale = 4,  // and their scales, which lie apart from the keys in each page
  kConv = 5,        // linear attention: the last inputs of the convolution
  kRecurrent = 6,   // linear attention: the recurrent state
};
inline constexpr std::uint32_t kBufferKinds = 7;
std::string_view to_string(BufferKind kind);  // "key", "value", "latent", "index_key", ...
Result<BufferKind> parse_buffer_kind(std::string_view text);
constexpr bool is_state(BufferKind kind) {
  return kind == BufferKind::kConv || kind == BufferKind::kRecurrent;
}

/// How the rows of a buffer are counted, and what names them in a request.
enum class RowSpace : std::uint8_t {
  kTokens = 0,  // a row per token that the DCP rank owns, page_size in a page; the request's pages
  kDraft = 1,   // a row per token on every DCP rank, page_size * dcp in a page; the request's pages
  kWindow = 2,  // as kTokens, but only the last tokens and in pages of their own
  kState = 3,   // a row per request; its state slot
};
inline constexpr std::uint32_t kRowSpaces = 4;
std::string_view to_string(RowSpace space);  // "tokens", "draft", "window", "state"

/// One recurrent tensor of a linear-attention layer: `outer` times the concatenation of `blocks` elements
/// along the axis that TP shards, each block by itself (pd-spec 10.6).
struct StateTensor {
  BufferKind kind = BufferKind::kConv;
  std::uint32_t outer = 1;
  std::vector<std::uint32_t> blocks;
  std::uint32_t element_bytes = 0;  // one element of the sharded axis with everything inside it

  std::uint64_t elements() const;  // sum of the blocks
  friend bool operator==(const StateTensor&, const StateTensor&) = default;
};

/// One buffer of a whole model.
struct BufferId {
  std::uint32_t layer = 0;
  BufferKind kind = BufferKind::kLatent;
  friend auto operator<=>(const BufferId&, const BufferId&) = default;
};

struct ModelGeometry {
  std::string name;  // preset name, or config.json's model_type / _name_or_path
  AttentionKind attention = AttentionKind::kMha;
  std::uint32_t hidden_layers = 0;            // all decoder layers of the target model
  std::vector<std::uint32_t> kv_layers;       // ids of the layers that own KV for every token, ascending
  std::vector<std::uint32_t> sliding_layers;  // ids of sliding-window layers (gpt-oss); empty otherwise
  std::uint32_t sliding_window = 0;           // tokens; 0 = none
  std::uint32_t kv_heads = 0;        // total over all TP ranks; 1 for MLA (the latent counts as one head)
  std::uint32_t head_dim = 0;        // K elements per head (MHA)
  std::uint32_t v_head_dim = 0;      // V elements per head (MHA); usually equal to head_dim
  std::uint32_t latent_dim = 0;      // kv_lora_rank (MLA)
  std::uint32_t rope_dim = 0;        // qk_rope_head_dim (MLA)
  std::uint32_t index_head_dim = 0;  // DSA indexer keys (DeepSeek-V3.2); 0 = none
  std::uint32_t hidden_size = 0;
  std::uint32_t draft_layers = 0;           // of the draft model or MTP; their ids follow hidden_layers
  std::vector<std::uint32_t> state_layers;  // ids of linear-attention layers, ascending
  std::vector<StateTensor> state;           // of each state layer, in pool order
  Dtype dtype = Dtype::kBf16;

  /// Bytes of one head of one token of one buffer: head_dim*b, v_head_dim*b, or (latent+rope)*b for MLA. One
  /// exception: the DSA latent (index_head_dim > 0) in fp8_e4m3 has the scaled layout, latent bytes + one
  /// fp32 scale per 128 of them + rope in bf16 (DeepSeek-V3.2: 656 B).
  /// Index kinds: the bytes of one token. State kinds: 0, they have no heads.
  std::uint32_t head_bytes(BufferKind kind) const;
  /// The attention buffer kinds of one KV layer in pool order: {key, value} or {latent}.
  std::vector<BufferKind> buffer_kinds() const;
  /// kv_layers and sliding_layers, ascending.
  std::vector<std::uint32_t> cached_layers() const;
  /// Every buffer that a pool of the whole model has, in pool order: by kind, then by layer. Draft layers
  /// (same attention as the target) come last, and only when asked for.
  std::vector<BufferId> pool_buffers(bool with_draft) const;
  /// Whether such a buffer exists, draft layers included.
  bool has_buffer(const BufferId& id) const;
  RowSpace row_space(const BufferId& id) const;
  /// The tensor of a state kind, or null.
  const StateTensor* state_tensor(BufferKind kind) const;
  /// Bytes of one token of one KV layer over all heads, index rows included (preflight-spec 5.1,
  /// "B/token/layer").
  std::uint64_t bytes_per_token_layer() const;
  /// Bytes of one token over all layers that own KV, sliding layers included (preflight-spec 5.1, "B/token").
  std::uint64_t bytes_per_token() const;
  /// DSA index bytes per token and layer: index_head_dim keys (1 B each) + one fp32 scale per 128 keys; else
  /// 0.
  std::uint32_t index_bytes() const;
};

/// Sizes in range (so that row and page arithmetic cannot overflow), layer ids ascending and inside the
/// model, the fields of the attention kind present. Every violation is in the one message (kInvalid).
Result<void> validate(const ModelGeometry& model);

/// One of the ten presets of preflight-spec 5.1, by lower-case name: llama-3.1-8b, llama-3.1-70b,
/// llama-3.1-405b, qwen3-32b, qwen3-235b-a22b, glm-4.5, gpt-oss-120b, deepseek-v3, kimi-k2, deepseek-v3.2;
/// and of the linear hybrids of its section 5: qwen3-next-80b-a3b, kimi-linear-48b-a3b. Unknown names list
/// the known ones. The dtype is bf16; callers replace it.
Result<ModelGeometry> preset_geometry(std::string_view name);
std::vector<std::string> preset_names();

/// Reads the text of a Hugging Face config.json (text_config when present). Every missing or wrong field is
/// named in one Error. Models whose KV this version cannot describe are refused by name of the reason. The
/// text may be hostile: size, nesting, types and numbers are all limited.
Result<ModelGeometry> geometry_from_hf_config(std::string_view json_text);

/// A preset name, or a path to a config.json (or to the folder that holds it).
Result<ModelGeometry> load_geometry(std::string_view preset_or_path);

}  // namespace kvferry
