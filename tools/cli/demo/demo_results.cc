#include "tools/cli/demo/demo_results.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace kvferry {

std::uint64_t union_ns(std::vector<ActiveTime> intervals) {
  std::sort(intervals.begin(), intervals.end(),
            [](const ActiveTime& a, const ActiveTime& b) { return a.begin < b.begin; });
  std::uint64_t total = 0;
  std::uint64_t covered = 0;
  for (const ActiveTime& interval : intervals) {
    const std::uint64_t begin = std::max(interval.begin, covered);
    if (interval.end > begin) {
      total += interval.end - begin;
      covered = interval.end;
    }
  }
  return total;
}

double percentile(std::vector<double> samples, double share) {
  if (samples.empty()) {
    return 0;
  }
  std::sort(samples.begin(), samples.end());
  const double rank = std::ceil(share * static_cast<double>(samples.size()));
  const auto index = static_cast<std::size_t>(std::max(rank, 1.0)) - 1;
  return samples[std::min(index, samples.size() - 1)];
}

std::string format_bytes(std::uint64_t bytes) {
  const auto value = static_cast<double>(bytes);
  if (bytes >= 1'000'000'000) {
    return fmt::format("{:.2f} GB", value / 1e9);
  }
  return bytes >= 1'000'000 ? fmt::format("{:.1f} MB", value / 1e6) : fmt::format("{} B", bytes);
}

std::string describe_mismatch(Room room, const nlohmann::json& landed) {
  const auto first = landed.find("first");
  if (first == landed.end()) {
    return fmt::format("MISMATCH room {} aux row: {}", room, landed.value("aux_first", "unknown"));
  }
  const auto number = [&](const char* field) { return first->value(field, std::uint64_t{0}); };
  const std::string kind = first->value("kind", "");
  const std::string place =
      first->value("guard", false)
          ? fmt::format(
                "MISMATCH room {} layer {} {} rank {} page {} slot {}: a row that nobody may write was "
                "written, byte {}",
                room, number("layer"), kind, number("rank"), number("page"), number("slot"), number("byte"))
          : fmt::format("MISMATCH room {} layer {} {} position {} rank {} head {} (page {} slot {}): byte {}",
                        room, number("layer"), kind, number("position"), number("rank"), number("head"),
                        number("page"), number("slot"), number("byte"));
  return fmt::format("{} must be {:#04x} and is {:#04x}; {} differing bytes in this room", place,
                     number("expected"), number("found"), landed.value("mismatches", std::uint64_t{0}));
}

std::string results_table(const DemoResults& results, const std::vector<std::string>& metrics) {
  std::string table;
  const auto row = [&](std::string_view name, const std::string& text) {
    table += fmt::format("  {:<12} {}\n", name, text);
  };
  row("requests", fmt::format("{} of {} landed, {} failed{}; {} with a prefix hit ({} tokens not moved)",
                              results.landed, results.requests_wanted, results.failed,
                              results.killed > 0 ? fmt::format(", {} ended by the kill", results.killed) : "",
                              results.prefix_hits, results.prefix_tokens));
  row("bytes", fmt::format("{} of KV rows of {} tokens", format_bytes(results.bytes), results.tokens));
  const std::uint64_t active = union_ns(results.active);
  const double replay = active == 0 ? 0 : static_cast<double>(results.bytes) / static_cast<double>(active);
  const auto share = [&](double gigabytes) {
    return results.memcpy_rate > 0 ? 100e9 * gigabytes / results.memcpy_rate : 0;
  };
  row("GB/s",
      fmt::format("{:.2f} replay: bytes / time in which at least one room was between first post and landing "
                  "({:.2f} s), beside filling and checking; {:.0f} % of memcpy",
                  replay, static_cast<double>(active) / 1e9, share(replay)));
  if (!results.alone_rates.empty()) {
    const double alone = percentile(results.alone_rates, 0.5) / 1e9;
    row("", fmt::format(
                "{:.2f} one room alone: all pages filled before the first post, median of {} rooms; {:.0f} % "
                "of memcpy",
                alone, results.alone_rates.size(), share(alone)));
  }
  row("", fmt::format("{:.2f} memcpy: one thread, pages of {} bytes in random order, same run",
                      results.memcpy_rate / 1e9, results.memcpy_page));
  row("seconds", fmt::format("p50 {:.3f}  p99 {:.3f}  (first post to landing)",
                             percentile(results.seconds, 0.5), percentile(results.seconds, 0.99)));
  row("verified",
      fmt::format("{} bytes, every byte of the destination pages and aux rows", results.verified));
  row("mismatches", fmt::format("{}", results.mismatches));
  row("leaks", results.balanced
                   ? fmt::format("{} pages, {} aux slots", results.leaked_pages, results.leaked_slots)
                   : std::string("not checked: the run did not reach its end"));
  for (std::size_t i = 0; i < metrics.size(); ++i) {
    row(i == 0 ? "metrics" : "", metrics[i]);
  }
  return table;
}

}  // namespace kvferry
