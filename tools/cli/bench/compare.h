#pragma once
// A run beside a stored one. Only ratios to memcpy in the same run are compared: absolute rates are those of
// a machine and a moment. Pure.

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "common/base/result.h"

namespace kvferry {

struct Comparison {
  std::uint32_t compared = 0;  // cells times fabrics that both runs have
  std::uint32_t fallen = 0;    // of them, whose median ratio fell by more than the tolerance
  std::vector<std::string> lines;
};

/// Both in the format of report_json(). A ratio has fallen when it is below `tolerance` (a share, 0 to 1)
/// less than the baseline's. kInvalid names what a baseline lacks, or that the runs have no cell in common.
Result<Comparison> compare_runs(const nlohmann::json& run, const nlohmann::json& baseline, double tolerance);

/// A stored run. Errors name the file.
Result<nlohmann::json> load_run(const std::string& path);

}  // namespace kvferry
