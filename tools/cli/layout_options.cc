#include "tools/cli/layout_options.h"

#include <CLI/CLI.hpp>

namespace kvferry {

void add_layout_options(CLI::App& command, LayoutOptions& options) {
  command.add_option("--model", options.model, "preset name or path of a config.json")->capture_default_str();
  command.add_option("--dtype", options.dtype,
                     "bf16, fp16, fp8_e4m3, fp8_e5m2, fp32, int8; replaces the model's");
  command.add_option("--prefill", options.prefill, "prefill layout")->capture_default_str();
  command.add_option("--decode", options.decode,
                     "decode layout; default tp=4,dcp=4 for MLA models, tp=4 for others");
  command
      .add_option("--draft-layers", options.draft_layers,
                  "layers of a draft model whose KV moves too (speculative decoding)")
      ->check(CLI::Range(0u, 64u));
}

}  // namespace kvferry
