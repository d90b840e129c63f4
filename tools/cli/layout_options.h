#pragma once
// The options that name a model and two layouts, for every subcommand that takes them.

#include <cstdint>
#include <string>

#include "common/model/geometry.h"

namespace CLI {
class App;
}

namespace kvferry {

struct LayoutOptions {
  std::string model = "deepseek-v3";
  std::string dtype;  // empty: the model's
  std::string prefill = "tp=2";
  std::string decode;  // empty: tp=4,dcp=4 for MLA models, tp=4 for others
  std::uint32_t page_size = 64;
  std::uint32_t decode_page_size = 0;  // 0: page_size
  std::uint32_t draft_layers = 0;

  std::string decode_layout(const ModelGeometry& geometry) const {
    if (!decode.empty()) {
      return decode;
    }
    return geometry.attention == AttentionKind::kMla ? "tp=4,dcp=4" : "tp=4";
  }
};

/// All but the page sizes. `options` outlives the parsing.
void add_layout_options(CLI::App& command, LayoutOptions& options);

}  // namespace kvferry
