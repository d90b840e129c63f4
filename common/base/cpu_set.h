#pragma once
// Which processors a daemon's data threads may use, as the operator wrote it: "" (all), a list like "0-3,8",
// or "node1" (the processors of a NUMA node). A whole set, not one processor per thread: the scheduler
// balances within it.

#include <sched.h>

#include <string>
#include <string_view>

#include "common/base/result.h"

namespace kvferry {

class CpuSet {
 public:
  CpuSet() = default;  // all
  /// kInvalid names what is wrong: the form, a node that is not there, a processor that this process may not
  /// use.
  static Result<CpuSet> parse(std::string_view text);
  const std::string& text() const { return text_; }

 private:
  friend class PinnedScope;
  std::string text_;
  cpu_set_t cpus_{};
};

/// While it lives, threads that this thread starts run on `cpus` only, and this thread too; then this thread
/// has its own set again.
class PinnedScope {
 public:
  explicit PinnedScope(const CpuSet& cpus);
  ~PinnedScope();
  PinnedScope(const PinnedScope&) = delete;
  PinnedScope& operator=(const PinnedScope&) = delete;

 private:
  bool pinned_ = false;
  cpu_set_t before_{};
};

}  // namespace kvferry
