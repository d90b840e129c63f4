#include "tools/cli/demo/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>

namespace kvferry {

Progress::Progress() : terminal_(::isatty(STDOUT_FILENO) == 1) {}

void Progress::show(const DemoResults& results, std::size_t in_flight) {
  const auto now = std::chrono::steady_clock::now();
  if (now < next_) {
    return;
  }
  next_ = now + std::chrono::milliseconds(terminal_ ? 200 : 2000);
  const std::string line = fmt::format(
      "{} of {} landed, {} in flight, {} moved, {} bytes verified, {} mismatches", results.landed,
      results.requests_wanted, in_flight, format_bytes(results.bytes), results.verified, results.mismatches);
  fmt::print("{}{}{}", terminal_ ? "\r\x1b[K" : "", line, terminal_ ? "" : "\n");
  std::fflush(stdout);
  open_ = terminal_;
}

void Progress::show(const std::string& line) {
  if (terminal_) {
    fmt::print("\r\x1b[K{}", line);
    std::fflush(stdout);
    open_ = true;
  }
}

void Progress::print(const std::string& lines) {
  finish();
  fmt::print("{}", lines);
  std::fflush(stdout);
}

void Progress::note(const std::string& line) {
  print(line + "\n");
}

void Progress::finish() {
  if (open_) {
    fmt::print("\r\x1b[K");
    open_ = false;
  }
}

}  // namespace kvferry
