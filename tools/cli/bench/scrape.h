#pragma once
// Samples from a daemon's metrics.

#include <cstdint>
#include <string>
#include <string_view>

#include "common/base/result.h"

namespace kvferry {

/// The sum over all labels of counter `name` in the Prometheus text format; 0 where it does not occur. Pure.
double sum_counter(std::string_view text, std::string_view name);

/// The value of a label of the first sample of `name`, without escapes; empty where there is none. Pure.
std::string label_of(std::string_view text, std::string_view name, std::string_view label);

/// Of shm, from what carries its bytes ("shm 2x avx512"): 2; 0 for other fabrics. Pure.
std::uint32_t copy_threads_of(std::string_view carries);

/// The text of http://`address`/metrics, "host:port".
Result<std::string> scrape(const std::string& address);

/// sum_counter() of it.
Result<double> scrape_counter(const std::string& address, std::string_view name);

}  // namespace kvferry
