#pragma once
// What one side of the synthetic engine does with commands, events and spare time. EngineLoop owns the ranks
// and calls a role from one thread; work() takes short steps (one buffer of one room) so that events are
// read, and stamped, promptly.

#include <nlohmann/json.hpp>

#include <span>
#include <string>

#include "common/base/result.h"
#include "tools/engine/rank.h"

namespace kvferry {

/// Where events for the router go.
class EventSink {
 public:
  virtual ~EventSink() = default;
  virtual void emit(const nlohmann::json& event) = 0;
};

struct RoleOptions {
  ModelGeometry model;
  std::uint32_t dp_size = 1;
  std::uint64_t seed = 1;
};

class EngineRole {
 public:
  virtual ~EngineRole() = default;
  /// A command that starts or aborts a room. An error refuses it and changes nothing.
  virtual Result<void> on_command(const std::string& op, const nlohmann::json& command) = 0;
  virtual void on_event(Rank& rank, const kvf_event& event, Instant now) = 0;
  /// The rank's daemon is gone, and with it every room that was alive there.
  virtual void on_lost(Rank& rank, const std::string& reason) = 0;
  /// One step. True when another step can follow at once; false when only time or an event can bring work.
  virtual bool work(Instant now) = 0;
  /// A refused call is to be repeated soon.
  virtual bool waits_for_retry() const = 0;
};

/// Whether a refused call may be repeated as it is: a limit, or a daemon that is just going away.
inline bool try_again_later(int code) {
  return code == -KVF_EXHAUSTED || code == -KVF_UNAVAILABLE;
}

/// The Error of a refused call.
Error refusal(const Rank& rank, const char* call, int code);
/// {"event":verdict,"room":..,"code":..,"reason":..} of a room that did not land.
nlohmann::json failure_event(Room room, const Error& error);
/// Tells the router about a final event for a room that has none to come: each accepted room gets exactly
/// one.
void report_stray(EventSink& sink, const Rank& rank, const kvf_event& event);
/// The failure that a FAILED or ABORTED event carries.
Error event_error(const kvf_event& event);

}  // namespace kvferry
