#pragma once
// Which cells a bench runs: models, cut to a number of layers, times layouts, times (tokens, rooms). What
// makes no sense together is left out by name. Pure.

#include <cstdint>
#include <string>
#include <vector>

#include "common/base/result.h"
#include "common/model/geometry.h"
#include "tools/cli/bench/bench_options.h"

namespace kvferry {

/// `rooms` rooms of `tokens` tokens in flight at once.
struct BenchCell {
  std::uint64_t tokens = 0;
  std::uint32_t rooms = 1;
  std::uint64_t beside = 0;  // tokens of one more room that moves at the same time; 0: none
  friend bool operator==(const BenchCell&, const BenchCell&) = default;
};

struct BenchLayout {
  std::string name;
  std::string prefill;  // as parse_topology() reads it
  std::string decode;
  friend bool operator==(const BenchLayout&, const BenchLayout&) = default;
};

/// Everything that one set of daemons and pools serves.
struct BenchGroup {
  std::string model;
  std::uint32_t layers = 0;  // that are kept
  std::uint32_t layers_of_model = 0;
  AttentionKind attention = AttentionKind::kMha;
  std::string model_text;  // config.json of the cut model; empty: the model is whole
  std::uint64_t token_bytes = 0;
  BenchLayout layout;
  std::vector<BenchCell> cells;
};

struct BenchMatrix {
  std::string name;  // quick, default, full or custom
  std::vector<std::string> fabrics;
  std::uint32_t rounds = 5;
  std::uint64_t memory = 0;       // bytes for the pools of both sides
  std::uint64_t batch_bytes = 0;  // that a round moves at least, memory permitting
  std::vector<BenchGroup> groups;
  std::vector<std::string> left_out;  // a line each
};

/// Errors (kInvalid, kNotFound) name option, value and what is possible.
Result<BenchMatrix> bench_matrix(const BenchOptions& options);

/// The text of a config.json with the first `layers` layers of the model. kInvalid for models whose layers
/// are not all alike.
Result<std::string> cut_model(const ModelGeometry& model, std::uint32_t layers);

}  // namespace kvferry
