#pragma once
// What goes wrong, and when: a list that is drawn from the seed before the run and given to the world, so
// that a failing run can be repeated with fewer faults until only those are left that matter.

#include <cstdint>
#include <string>
#include <vector>

#include "tests/sim/schedule.h"
#include "tests/support/rng.h"

namespace kvferry::sim {

enum class FaultKind : std::uint8_t {
  kAbortPrefill,       // the engine of rank `a` aborts one of its rooms
  kAbortDecode,        //
  kLoseMessage,        // on the control channel from daemon `a`; the next message
  kRepeatMessage,      //
  kReorderMessage,     // the next message arrives after the one that follows it
  kCutMessage,         // the next message arrives cut in the middle
  kStallControl,       // one-way partition of the control channel from daemon `a`, for `length`
  kStallFabric,        // the fabric of daemon `a` moves nothing for `length`: slow drains
  kReset,              // both connections of daemon `a` are cut
  kCrashPrefill,       // SIGKILL of daemon `a`, restarted after `length`
  kCrashDecode,        //
  kEngineDiesPrefill,  // the engine of rank `a`; another attaches after `length`
  kEngineDiesDecode,   //
  kClockJump,          // the clock of daemon `a` jumps ahead by `length`
  kPoolDrought,        // the decode engine of rank `a` has no free page for `length`
  kFlipByte,           // one byte of the next payload that lands is changed on the way
};
inline constexpr std::uint8_t kFaultKinds = 16;
const char* to_string(FaultKind kind);

struct Fault {
  Nanos when = 0;
  FaultKind kind = FaultKind::kAbortDecode;
  std::uint32_t a = 0;     // taken modulo what there is
  std::uint32_t b = 0;     // which of its peers, or rooms
  bool to_decode = false;  // the direction, where there is one; which daemon, for kClockJump
  Nanos length = 0;
};
std::string describe(const Fault& fault);

/// The faults of one seed: a random subset of the kinds (none in every eighth seed, aborts only in every
/// fourth), each with a rate of its own, between `begin` and `end`.
std::vector<Fault> random_faults(test::Rng& rng, Nanos begin, Nanos end);

/// True when a room may fail although nobody aborted it.
bool disturbs_others(FaultKind kind);

}  // namespace kvferry::sim
