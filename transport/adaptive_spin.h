#pragma once
// How long a fabric's thread polls before it sleeps. Waking a sleeping thread takes 5 to 50 us where the core
// went idle, and a stream of blocks meets that again and again: polling instead has doubled what tcp carries.
// Polling is only worth it while something comes soon, so the budget follows what the last wait would have
// needed: all of it after a wait that polling could have covered, half of it after a longer one. A thread
// that nothing comes for does not poll at all. Single-threaded.

#include "transport/fabric.h"

namespace kvferry {

class AdaptiveSpin {
 public:
  /// `max` = 0: never polls.
  explicit AdaptiveSpin(Nanos max) : max_(max) {}

  /// How long to poll in the next wait.
  Nanos budget() const { return budget_; }
  /// The last wait, polling and sleep together, took this long.
  void waited(Nanos took) {
    if (took <= max_) {
      budget_ = max_;
    } else {
      budget_ /= 2;
      budget_ = budget_ < max_ / 16 ? 0 : budget_;
    }
  }

 private:
  Nanos max_;
  Nanos budget_ = 0;
};

}  // namespace kvferry
