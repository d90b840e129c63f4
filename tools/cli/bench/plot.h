#pragma once
// Draws a stored run with tools/bench/plot.py, which needs Python's matplotlib.

#include <filesystem>
#include <string>

#include "common/base/result.h"

namespace kvferry {

/// Finds Python, matplotlib and the script before a long run. kNotFound says what to install.
Result<void> check_plot(const std::filesystem::path& program_directory);

/// Writes `svg` from the JSON file of a run.
Result<void> draw_plot(const std::filesystem::path& program_directory, const std::string& run,
                       const std::string& svg);

}  // namespace kvferry
