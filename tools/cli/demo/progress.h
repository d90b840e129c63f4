#pragma once
// Progress of the replay: one line that is rewritten on a terminal, a line now and then elsewhere.

#include <chrono>
#include <cstdint>
#include <string>

#include "tools/cli/demo/demo_results.h"

namespace kvferry {

class Progress {
 public:
  Progress();
  /// Shows the state, at most five times a second on a terminal and every two seconds elsewhere.
  void show(const DemoResults& results, std::size_t in_flight);
  /// On a terminal, shows the line until something else is shown; nothing elsewhere.
  void show(const std::string& line);
  /// Prints whole lines above the progress.
  void print(const std::string& lines);
  /// The same with one line, without its end.
  void note(const std::string& line);
  /// Leaves the terminal at the start of a fresh line.
  void finish();

 private:
  bool terminal_;
  bool open_ = false;  // the cursor is on a progress line
  std::chrono::steady_clock::time_point next_{};
};

}  // namespace kvferry
