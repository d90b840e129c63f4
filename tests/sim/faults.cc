#include "tests/sim/faults.h"

#include <fmt/format.h>

#include <algorithm>

namespace kvferry::sim {

const char* to_string(FaultKind kind) {
  switch (kind) {
    case FaultKind::kAbortPrefill:
      return "prefill engine aborts";
    case FaultKind::kAbortDecode:
      return "decode engine aborts";
    case FaultKind::kLoseMessage:
      return "message lost";
    case FaultKind::kRepeatMessage:
      return "message repeated";
    case FaultKind::kReorderMessage:
      return "message reordered";
    case FaultKind::kCutMessage:
      return "message cut";
    case FaultKind::kStallControl:
      return "control channel stalls";
    case FaultKind::kStallFabric:
      return "fabric stalls";
    case FaultKind::kReset:
      return "connections reset";
    case FaultKind::kCrashPrefill:
      return "prefill daemon killed";
    case FaultKind::kCrashDecode:
      return "decode daemon killed";
    case FaultKind::kEngineDiesPrefill:
      return "prefill engine dies";
    case FaultKind::kEngineDiesDecode:
      return "decode engine dies";
    case FaultKind::kClockJump:
      return "clock jumps";
    case FaultKind::kPoolDrought:
      return "pool exhausted";
    case FaultKind::kFlipByte:
      return "a byte is changed on the way";
  }
  return "?";
}

std::string describe(const Fault& fault) {
  return fmt::format("{:.3f} ms: {} (a {} b {}{}, for {:.3f} ms)",
                     static_cast<double>(fault.when - kSecond) / 1e6, to_string(fault.kind), fault.a, fault.b,
                     fault.to_decode ? ", towards decode" : "", static_cast<double>(fault.length) / 1e6);
}

bool disturbs_others(FaultKind kind) {
  return kind != FaultKind::kAbortPrefill && kind != FaultKind::kAbortDecode &&
         kind != FaultKind::kPoolDrought && kind != FaultKind::kFlipByte;
}

std::vector<Fault> random_faults(test::Rng& rng, Nanos begin, Nanos end) {
  std::vector<Fault> out;
  const std::uint64_t style = rng.below(8);
  if (style == 0) {
    return out;
  }
  for (std::uint8_t number = 0; number < kFaultKinds; ++number) {
    const auto kind = static_cast<FaultKind>(number);
    const bool gentle = !disturbs_others(kind);
    if ((style <= 2 && !gentle) || !rng.chance(gentle ? 2 : 1, 3)) {
      continue;
    }
    const std::uint64_t count = rng.between(1, gentle ? 40 : 4);
    for (std::uint64_t i = 0; i < count; ++i) {
      Fault fault;
      fault.when = begin + static_cast<Nanos>(rng.below(static_cast<std::uint64_t>(end - begin)));
      fault.kind = kind;
      fault.a = static_cast<std::uint32_t>(rng.below(64));
      fault.b = static_cast<std::uint32_t>(rng.below(64));
      fault.to_decode = rng.chance(1, 2);
      // From a blink to longer than every deadline.
      fault.length = static_cast<Nanos>(kMicro) << rng.below(23);
      out.push_back(fault);
    }
  }
  std::stable_sort(out.begin(), out.end(), [](const Fault& x, const Fault& y) { return x.when < y.when; });
  return out;
}

}  // namespace kvferry::sim
