#include "common/model/geometry.h"

#include <algorithm>
#include <iterator>
#include <numeric>

namespace kvferry {
namespace {

// Far above every published model, low enough that heads * elements * bytes stays below 2^31.
constexpr std::uint32_t kLayersMax = 4096;
constexpr std::uint32_t kHeadsMax = 4096;
constexpr std::uint32_t kHeadElementsMax = 65536;
constexpr std::uint32_t kHiddenSizeMax = 1u << 24;
constexpr std::uint32_t kWindowMax = 1u << 24;
constexpr std::size_t kStateBlocksMax = 16;
constexpr std::uint32_t kStateOuterMax = 64;
constexpr std::uint64_t kStateBytesMax = 1u << 30;

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
  void disjoint(const ModelGeometry& model) {
    std::vector<std::uint32_t> all;
    for (const auto* layers : {&model.kv_layers, &model.sliding_layers, &model.state_layers}) {
      all.insert(all.end(), layers->begin(), layers->end());
    }
    std::sort(all.begin(), all.end());
    if (const auto twice = std::adjacent_find(all.begin(), all.end()); twice != all.end()) {
      add("layer {} is in two of kv_layers, sliding_layers and state_layers", *twice);
    }
  }
  void state(const ModelGeometry& model) {
    if (model.state_layers.empty() != model.state.empty() || model.state.size() > 2) {
      add("state has {} tensors for {} state_layers, must be 1 or 2 where there are such layers",
          model.state.size(), model.state_layers.size());
    }
    for (std::size_t i = 0; i < model.state.size(); ++i) {
      const StateTensor& tensor = model.state[i];
      if (!is_state(tensor.kind) || (i > 0 && tensor.kind == model.state[0].kind)) {
        add("state[{}].kind is {}, must be conv or recurrent, each once", i, to_string(tensor.kind));
      }
      if (tensor.blocks.empty() || tensor.blocks.size() > kStateBlocksMax ||
          std::count(tensor.blocks.begin(), tensor.blocks.end(), 0u) > 0 || tensor.outer == 0 ||
          tensor.outer > kStateOuterMax || tensor.element_bytes == 0 ||
          tensor.elements() > kStateBytesMax / tensor.outer / tensor.element_bytes) {
        add("state[{}] has {} blocks, outer {} and element_bytes {}, must be non-empty and within {} bytes",
            i, tensor.blocks.size(), tensor.outer, tensor.element_bytes, kStateBytesMax);
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
    case BufferKind::kIndexKey:
      return index_head_dim;
    case BufferKind::kIndexScale:
      return index_head_dim == 0 ? 0 : scale_bytes(index_head_dim);
    case BufferKind::kConv:
    case BufferKind::kRecurrent:
      return 0;
  }
  return 0;
}

std::uint64_t StateTensor::elements() const {
  return std::accumulate(blocks.begin(), blocks.end(), std::uint64_t{0});
}

const StateTensor* ModelGeometry::state_tensor(BufferKind kind) const {
  const auto found =
      std::find_if(state.begin(), state.end(), [kind](const StateTensor& t) { return t.kind == kind; });
  return found == state.end() ? nullptr : &*found;
}

bool ModelGeometry::has_buffer(const BufferId& id) const {
  const auto in = [&id](const std::vector<std::uint32_t>& layers) {
    return std::binary_search(layers.begin(), layers.end(), id.layer);
  };
  if (is_state(id.kind)) {
    return in(state_layers) && state_tensor(id.kind) != nullptr;
  }
  const bool draft = id.layer >= hidden_layers && id.layer - hidden_layers < draft_layers;
  if (id.kind == BufferKind::kIndexKey || id.kind == BufferKind::kIndexScale) {
    return index_head_dim > 0 && (draft || in(kv_layers));
  }
  const bool mla = attention == AttentionKind::kMla;
  return mla == (id.kind == BufferKind::kLatent) && (draft || in(kv_layers) || in(sliding_layers));
}

std::vector<BufferId> ModelGeometry::pool_buffers(bool with_draft) const {
  std::vector<BufferId> out;
  const auto add = [&](std::uint32_t begin, std::uint32_t end) {
    for (std::uint32_t kind = 0; kind < kBufferKinds; ++kind) {
      for (std::uint32_t layer = begin; layer < end; ++layer) {
        const BufferId id{layer, static_cast<BufferKind>(kind)};
        if (has_buffer(id)) {
          out.push_back(id);
        }
      }
    }
  };
  add(0, hidden_layers);
  if (with_draft) {
    add(hidden_layers, hidden_layers + draft_layers);
  }
  return out;
}

RowSpace ModelGeometry::row_space(const BufferId& id) const {
  if (is_state(id.kind)) {
    return RowSpace::kState;
  }
  if (id.layer >= hidden_layers) {
    return RowSpace::kDraft;
  }
  return std::binary_search(sliding_layers.begin(), sliding_layers.end(), id.layer) ? RowSpace::kWindow
                                                                                    : RowSpace::kTokens;
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
  bad.layers("state_layers", model.state_layers, model.hidden_layers);
  bad.disjoint(model);
  bad.state(model);
  bad.range("draft_layers", model.draft_layers, 0, kLayersMax);
  if (!model.sliding_layers.empty()) {
    bad.range("sliding_window", model.sliding_window, 1, kWindowMax);
  }
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
