#include "common/model/geometry.h"

#include <algorithm>
#include <iterator>

namespace kvferry {
namespace {

// Far above every published model, low enough that heads * elements * bytes stays below 2^31.
constexpr std::uint32_t kLayersMax = 4096;
constexpr std::uint32_t kHeadsMax = 4096;
constexpr std::uint32_t kHeadElementsMax = 65536;
constexpr std::uint32_t kHiddenSizeMax = 1u << 24;

// Elements that share one fp32 scale in the scaled fp8 layouts of DSA.
constexpr std::uint32_t kScaleGroup = 128;

std::uint32_t scale_bytes(std::uint32_t elements) {
  return (elements + kScaleGroup - 1) / kScaleGroup * 4;
}

class Violations {
 public:
  template <class... Args>
  void add(fmt::format_string<Args...> format, Args&&... args) {
    text_ += text_.empty() ? "" : "; ";
    text_ += fmt::format(format, std::forward<Args>(args)...);
  }
  void range(std::string_view field, std::uint64_t value, std::uint64_t low, std::uint64_t high) {
    if (value < low || value > high) {
      add("{} is {}, must be {} to {}", field, value, low, high);
    }
  }
  void layers(std::string_view field, const std::vector<std::uint32_t>& ids, std::uint32_t hidden_layers) {
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] >= hidden_layers || (i > 0 && ids[i] <= ids[i - 1])) {
        add("{}[{}] is {}, must ascend and stay below hidden_layers {}", field, i, ids[i], hidden_layers);
        return;
      }
    }
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

}  // namespace

std::uint32_t ModelGeometry::head_bytes(BufferKind kind) const {
  const std::uint32_t element = dtype_bytes(dtype);
  switch (kind) {
    case BufferKind::kKey:
      return head_dim * element;
    case BufferKind::kValue:
      return v_head_dim * element;
    case BufferKind::kLatent:
      if (index_head_dim > 0 && dtype == Dtype::kFp8E4m3) {
        return latent_dim + scale_bytes(latent_dim) + rope_dim * dtype_bytes(Dtype::kBf16);
      }
      return (latent_dim + rope_dim) * element;
  }
  return 0;
}

std::vector<BufferKind> ModelGeometry::buffer_kinds() const {
  if (attention == AttentionKind::kMla) {
    return {BufferKind::kLatent};
  }
  return {BufferKind::kKey, BufferKind::kValue};
}

std::vector<std::uint32_t> ModelGeometry::cached_layers() const {
  std::vector<std::uint32_t> layers;
  layers.reserve(kv_layers.size() + sliding_layers.size());
  std::set_union(kv_layers.begin(), kv_layers.end(), sliding_layers.begin(), sliding_layers.end(),
                 std::back_inserter(layers));
  return layers;
}

std::uint64_t ModelGeometry::bytes_per_token_layer() const {
  std::uint64_t bytes = index_bytes();
  for (const BufferKind kind : buffer_kinds()) {
    bytes += std::uint64_t{kv_heads} * head_bytes(kind);
  }
  return bytes;
}

std::uint64_t ModelGeometry::bytes_per_token() const {
  return bytes_per_token_layer() * cached_layers().size();
}

std::uint32_t ModelGeometry::index_bytes() const {
  return index_head_dim == 0 ? 0 : index_head_dim + scale_bytes(index_head_dim);
}

Result<void> validate(const ModelGeometry& model) {
  Violations bad;
  bad.range("hidden_layers", model.hidden_layers, 1, kLayersMax);
  bad.layers("kv_layers", model.kv_layers, model.hidden_layers);
  bad.layers("sliding_layers", model.sliding_layers, model.hidden_layers);
  if (model.kv_layers.empty() && model.sliding_layers.empty()) {
    bad.add("kv_layers is empty, the model has no KV to move");
  }
  bad.range("draft_layers", model.draft_layers, 0, kLayersMax);
  bad.range("hidden_size", model.hidden_size, 0, kHiddenSizeMax);
  bad.range("index_head_dim", model.index_head_dim, 0, kHeadElementsMax);
  if (model.attention == AttentionKind::kMla) {
    bad.range("kv_heads of an MLA model", model.kv_heads, 1, 1);
    bad.range("latent_dim", model.latent_dim, 1, kHeadElementsMax);
    bad.range("rope_dim", model.rope_dim, 0, kHeadElementsMax);
  } else {
    bad.range("kv_heads", model.kv_heads, 1, kHeadsMax);
    bad.range("head_dim", model.head_dim, 1, kHeadElementsMax);
    bad.range("v_head_dim", model.v_head_dim, 1, kHeadElementsMax);
  }
  if (dtype_bytes(model.dtype) == 0) {
    bad.add("dtype number {} is unknown", static_cast<unsigned>(model.dtype));
  }
  if (!bad.text().empty()) {
    return fail(Code::kInvalid, "model geometry \"{}\": {}", model.name, bad.text());
  }
  return {};
}

}  // namespace kvferry
