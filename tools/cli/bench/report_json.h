#pragma once
// The bench's results as JSON, for --json, --plot and --compare. Pure.

#include <nlohmann/json.hpp>

#include "tools/cli/bench/bench_report.h"

namespace kvferry {

/// Of the format below; readers refuse others.
inline constexpr int kBenchSchema = 1;

/// {"schema", "machine", "matrix", "cells": [{"model", "layers", "layout", "tokens", "rooms", "beside",
/// "memcpy",
/// ..., "fabrics": [{"fabric", "to_memcpy": {"median", "min", "max"}, ...}]}], "daemons", "problems"}. Rates
/// are bytes per second, times seconds.
nlohmann::json report_json(const BenchReport& report);

}  // namespace kvferry
