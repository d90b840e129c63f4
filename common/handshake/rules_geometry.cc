#include <algorithm>
#include <iterator>

#include "common/handshake/rule_table.h"

namespace kvferry {

std::string id_ranges(const std::vector<std::uint32_t>& ids) {
  constexpr std::size_t kShown = 120;
  std::string out;
  for (std::size_t i = 0; i < ids.size();) {
    std::size_t last = i;
    while (last + 1 < ids.size() && ids[last + 1] == ids[last] + 1) {
      ++last;
    }
    if (out.size() > kShown) {
      return out + ",...";
    }
    out += out.empty() ? "" : ",";
    out += last == i ? fmt::format("{}", ids[i]) : fmt::format("{}-{}", ids[i], ids[last]);
    i = last + 1;
  }
  return out.empty() ? "none" : out;
}

namespace {

struct Field {
  std::string_view path;
  std::string_view phrase;  // begins the message
  std::string_view fix;
};

/// The form of most rules: one number that must be equal.
void compare(std::uint64_t prefill, std::uint64_t decode, const Field& field, RuleReport& report) {
  if (prefill != decode) {
    report.error({.field = field.path,
                  .prefill = fmt::format("{}", prefill),
                  .decode = fmt::format("{}", decode),
                  .message = fmt::format("{}: prefill {}, decode {}", field.phrase, prefill, decode),
                  .fix = std::string(field.fix)});
  }
}

constexpr std::string_view kSameModel = "serve the same checkpoint and revision on both sides";

// Rows are the unit of a plan, so pages of different sizes move, in more and shorter runs.
void check_page_size(const PeerPair& pair, RuleReport& report) {
  const std::uint32_t prefill = pair.prefill.page_size;
  const std::uint32_t decode = pair.decode.page_size;
  if (prefill != decode) {
    report.warning(
        {.field = "page_size",
         .prefill = fmt::format("{}", prefill),
         .decode = fmt::format("{}", decode),
         .message = fmt::format("Page size mismatch: prefill {}, decode {}; pages are regrouped on "
                                "the way, in smaller pieces",
                                prefill, decode),
         .fix = "for full speed start both engines with the same page size; an attention backend "
                "may have forced its own"});
  }
}

void check_dtype(const PeerPair& pair, RuleReport& report) {
  const Dtype prefill = pair.prefill.geometry.dtype;
  const Dtype decode = pair.decode.geometry.dtype;
  if (prefill != decode) {
    report.error({.field = "geometry.dtype",
                  .prefill = std::string(to_string(prefill)),
                  .decode = std::string(to_string(decode)),
                  .message = fmt::format("KV cache dtype mismatch: prefill {}, decode {}", to_string(prefill),
                                         to_string(decode)),
                  .fix = "start both engines with the same KV cache dtype, written out instead of auto"});
  }
}

void check_attention_kind(const PeerPair& pair, RuleReport& report) {
  const AttentionKind prefill = pair.prefill.geometry.attention;
  const AttentionKind decode = pair.decode.geometry.attention;
  if (prefill != decode) {
    report.error({.field = "geometry.attention",
                  .prefill = std::string(to_string(prefill)),
                  .decode = std::string(to_string(decode)),
                  .message = fmt::format("attention kinds differ: prefill {}, decode {}", to_string(prefill),
                                         to_string(decode)),
                  .fix = std::string(kSameModel)});
  }
}

std::vector<std::uint32_t> missing(const std::vector<std::uint32_t>& from,
                                   const std::vector<std::uint32_t>& in) {
  std::vector<std::uint32_t> out;
  std::set_difference(in.begin(), in.end(), from.begin(), from.end(), std::back_inserter(out));
  return out;
}

void check_layers(const PeerPair& pair, RuleReport& report) {
  const ModelGeometry& prefill = pair.prefill.geometry;
  const ModelGeometry& decode = pair.decode.geometry;
  compare(prefill.hidden_layers, decode.hidden_layers,
          {"geometry.hidden_layers", "layer counts differ", kSameModel}, report);
  if (prefill.kv_layers != decode.kv_layers) {
    report.error(
        {.field = "geometry.kv_layers",
         .prefill = id_ranges(prefill.kv_layers),
         .decode = id_ranges(decode.kv_layers),
         .message = fmt::format("layers with KV differ: prefill {}, decode {}; only at prefill: {}, only "
                                "at decode: {}",
                                id_ranges(prefill.kv_layers), id_ranges(decode.kv_layers),
                                id_ranges(missing(decode.kv_layers, prefill.kv_layers)),
                                id_ranges(missing(prefill.kv_layers, decode.kv_layers))),
         .fix = std::string(kSameModel)});
  }
}

void check_kv_heads(const PeerPair& pair, RuleReport& report) {
  compare(pair.prefill.geometry.kv_heads, pair.decode.geometry.kv_heads,
          {"geometry.kv_heads", "KV head counts differ", kSameModel}, report);
}

void check_head_dim(const PeerPair& pair, RuleReport& report) {
  compare(pair.prefill.geometry.head_dim, pair.decode.geometry.head_dim,
          {"geometry.head_dim", "key head sizes differ", kSameModel}, report);
}

void check_v_head_dim(const PeerPair& pair, RuleReport& report) {
  compare(pair.prefill.geometry.v_head_dim, pair.decode.geometry.v_head_dim,
          {"geometry.v_head_dim", "value head sizes differ", kSameModel}, report);
}

void check_latent_dim(const PeerPair& pair, RuleReport& report) {
  compare(pair.prefill.geometry.latent_dim, pair.decode.geometry.latent_dim,
          {"geometry.latent_dim", "MLA latent sizes differ", kSameModel}, report);
}

void check_rope_dim(const PeerPair& pair, RuleReport& report) {
  compare(pair.prefill.geometry.rope_dim, pair.decode.geometry.rope_dim,
          {"geometry.rope_dim", "MLA rope sizes differ", kSameModel}, report);
}

void check_index_head_dim(const PeerPair& pair, RuleReport& report) {
  compare(pair.prefill.geometry.index_head_dim, pair.decode.geometry.index_head_dim,
          {"geometry.index_head_dim", "sparse index key sizes differ", kSameModel}, report);
}

void check_sliding_window(const PeerPair& pair, RuleReport& report) {
  const ModelGeometry& prefill = pair.prefill.geometry;
  const ModelGeometry& decode = pair.decode.geometry;
  compare(prefill.sliding_window, decode.sliding_window,
          {"geometry.sliding_window", "sliding windows differ", kSameModel}, report);
  if (prefill.sliding_layers != decode.sliding_layers) {
    report.error({.field = "geometry.sliding_layers",
                  .prefill = id_ranges(prefill.sliding_layers),
                  .decode = id_ranges(decode.sliding_layers),
                  .message = fmt::format("sliding-window layers differ: prefill {}, decode {}",
                                         id_ranges(prefill.sliding_layers), id_ranges(decode.sliding_layers)),
                  .fix = "serve the same model, with hybrid window memory on or off on both sides"});
  }
}

std::string state_text(const ModelGeometry& model) {
  std::string out;
  for (const StateTensor& tensor : model.state) {
    out += fmt::format("{}{} {}x{} elements of {} bytes", out.empty() ? "" : ", ", to_string(tensor.kind),
                       tensor.outer, tensor.elements(), tensor.element_bytes);
  }
  return fmt::format("layers {} ({})", id_ranges(model.state_layers), out.empty() ? "no state" : out);
}

void check_state(const PeerPair& pair, RuleReport& report) {
  const ModelGeometry& prefill = pair.prefill.geometry;
  const ModelGeometry& decode = pair.decode.geometry;
  if (prefill.state_layers != decode.state_layers || prefill.state != decode.state) {
    report.error({.field = "geometry.state",
                  .prefill = state_text(prefill),
                  .decode = state_text(decode),
                  .message = fmt::format("recurrent state differs: prefill {}, decode {}",
                                         state_text(prefill), state_text(decode)),
                  .fix = std::string(kSameModel)});
  }
}

void check_draft(const PeerPair& pair, RuleReport& report) {
  compare(pair.prefill.geometry.draft_layers, pair.decode.geometry.draft_layers,
          {"geometry.draft_layers", "draft layers differ",
           "set the same draft_layers (speculative decoding) on both sides, or 0 to move none"},
          report);
}

constexpr Rule kRules[] = {
    {"page_size", check_page_size},
    {"dtype", check_dtype},
    {"attention_kind", check_attention_kind},
    {"layers", check_layers},
    {"kv_heads", check_kv_heads},
    {"head_dim", check_head_dim},
    {"v_head_dim", check_v_head_dim},
    {"latent_dim", check_latent_dim},
    {"rope_dim", check_rope_dim},
    {"index_head_dim", check_index_head_dim},
    {"sliding_window", check_sliding_window},
    {"state", check_state},
    {"draft_layers", check_draft},
};

}  // namespace

std::span<const Rule> geometry_rules() {
  return kRules;
}

}  // namespace kvferry
