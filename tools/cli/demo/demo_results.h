#pragma once
// What the demo has measured and found, and the table it prints at the end.

#include <nlohmann/json.hpp>

#include <cstdint>
#include <string>
#include <vector>

#include "common/base/ids.h"

namespace kvferry {

/// A half-open time of the steady clock, ns.
struct ActiveTime {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};
/// Nanoseconds covered by at least one of the intervals.
std::uint64_t union_ns(std::vector<ActiveTime> intervals);

/// Nearest-rank percentile (0 < share <= 1); 0 for no samples.
double percentile(std::vector<double> samples, double share);

struct DemoResults {
  std::uint64_t requests_wanted = 0;
  std::uint64_t landed = 0;
  std::uint64_t failed = 0;       // unexpectedly
  std::uint64_t killed = 0;       // failed because the demo killed a daemon
  std::uint64_t prefix_hits = 0;  // requests
  std::uint64_t prefix_tokens = 0;
  std::uint64_t clipped = 0;
  std::uint64_t tokens = 0;  // landed, without prefixes
  std::uint64_t bytes = 0;   // of KV rows that landed on decode ranks
  std::uint64_t verified = 0;
  std::uint64_t mismatches = 0;
  std::vector<ActiveTime> active;   // prefill: first post to landing
  std::vector<double> seconds;      // the same, per request
  std::vector<double> alone_rates;  // bytes per second of rooms that had the machine for themselves
  double memcpy_rate = 0;           // bytes per second
  std::uint64_t memcpy_page = 0;
  bool balanced = false;  // the engines were asked what they hold at the end
  std::uint64_t leaked_pages = 0;
  std::uint64_t leaked_slots = 0;
  std::vector<std::string> problems;  // one line each; any makes the demo fail

  bool good() const {
    return failed == 0 && mismatches == 0 && leaked_pages == 0 && leaked_slots == 0 && problems.empty();
  }
};

/// "MISMATCH room R layer L kind position P rank r head h: ..." from a decode engine's landed event.
std::string describe_mismatch(Room room, const nlohmann::json& landed);
std::string format_bytes(std::uint64_t bytes);
/// `metrics`: where they are, a line for each.
std::string results_table(const DemoResults& results, const std::vector<std::string>& metrics);

}  // namespace kvferry
