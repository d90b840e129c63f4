#pragma once
// A counter from a daemon's metrics.

#include <string>
#include <string_view>

#include "common/base/result.h"

namespace kvferry {

/// The sum over all labels of counter `name` in the Prometheus text format; 0 where it does not occur. Pure.
double sum_counter(std::string_view text, std::string_view name);

/// The same of http://`address`/metrics, "host:port".
Result<double> scrape_counter(const std::string& address, std::string_view name);

}  // namespace kvferry
