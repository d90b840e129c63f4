#pragma once
// The prefill side of the synthetic engine. A request gets pages on every rank, its rows are filled chunk by
// chunk (the "prefill"), and each chunk is handed to the daemon: as soon as a rank has filled it ("stream"),
// or all of them once the whole request is filled, which measures the transfer without the filling.

#include <cstdint>
#include <deque>
#include <optional>
#include <unordered_map>

#include "tools/engine/pattern.h"
#include "tools/engine/role.h"
#include "tools/engine/room_parts.h"

namespace kvferry {

class PrefillRole : public EngineRole {
 public:
  /// `ranks` and `sink` outlive the role.
  PrefillRole(RoleOptions options, std::span<Rank> ranks, EventSink& sink)
      : options_(std::move(options)), ranks_(ranks), sink_(sink) {}

  Result<void> on_command(const std::string& op, const nlohmann::json& command) override;
  void on_event(Rank& rank, const kvf_event& event, Instant now) override;
  void on_lost(Rank& rank, const std::string& reason) override;
  bool work(Instant now) override;
  bool waits_for_retry() const override;

 private:
  struct Send {
    std::uint64_t chunk = 0;
    std::size_t part = 0;
  };
  struct Request {
    RoomState state;
    std::uint64_t chunk_tokens = 0;
    std::uint64_t chunks = 1;
    bool stream = true;
    bool started = false;  // the router was told
    bool granted = false;  // likewise
    std::optional<PieceCoordinate> corrupt;
    std::uint32_t corrupt_byte = 0;
    std::uint64_t chunk = 0;  // next step to fill: chunk, part, buffer
    std::size_t part = 0;
    std::uint32_t buffer = 0;
    std::deque<Send> sends;
    Instant retry_at{};
    bool fills() const { return !state.failure && chunk < chunks; }
  };

  Result<void> start(const nlohmann::json& command);
  void choose_corruption(Request& request);
  Interval chunk_tokens(const Request& request, std::uint64_t chunk) const;
  void fill_step(Request& request);
  void corrupt(Request& request, RoomPart& part, const Interval& tokens);
  bool send_step(Request& request, Instant now);
  void on_granted(Request& request, const Rank& rank, const kvf_event& event);
  void on_refused(Request& request, RoomPart& part, const Error& error);
  void finish(Room room, Instant now);

  RoleOptions options_;
  std::span<Rank> ranks_;
  EventSink& sink_;
  std::unordered_map<Room, Request> requests_;
  std::deque<Room> turns_;  // rooms take turns, one step each
};

}  // namespace kvferry
