#pragma once
// The prefill side of the synthetic engine. A request gets pages on every rank, its rows are filled chunk by
// chunk (the "prefill"), and each chunk is handed to the daemon: as soon as a rank has filled it ("stream"),
// or all of them once the whole request is filled, which measures the transfer without the filling. With
// "layer_group" a chunk is sent in groups of so many layers: when streaming, all of them before the filling,
// each with a fence that opens when its layers are filled.

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "tools/engine/layer_groups.h"
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
    LayerGroup layers = {};
    std::shared_ptr<ReadyFence> fence = nullptr;  // null: the rows are there
  };
  struct PartLayers {  // of one rank
    std::vector<LayerGroup> groups;
    std::vector<std::uint32_t> buffers;  // in the order in which they are filled
  };
  struct Request {
    RoomState state;
    std::uint64_t chunk_tokens = 0;
    std::uint64_t chunks = 1;
    std::uint32_t layer_group = 0;
    std::vector<PartLayers> layers;  // of state.parts
    bool stream = true;
    bool started = false;  // the router was told
    bool granted = false;  // likewise
    std::optional<PieceCoordinate> corrupt;
    std::uint32_t corrupt_byte = 0;
    std::uint64_t chunk = 0;  // next step to fill: chunk, part, buffer (of those of PartLayers)
    std::size_t part = 0;
    std::uint32_t buffer = 0;
    std::deque<Send> closed;  // of the chunk and part that is being filled, whose fences are not open yet
    std::deque<Send> sends;
    Instant retry_at{};
    bool fills() const { return !state.failure && chunk < chunks; }
  };

  Result<void> start(const nlohmann::json& command);
  void choose_corruption(Request& request);
  Interval chunk_tokens(const Request& request, std::uint64_t chunk) const;
  std::vector<LayerGroup> groups(const Request& request, std::uint64_t chunk, std::size_t part) const;
  bool begin_groups(Request& request) const;
  static void open_fences(Request& request);
  void fill_step(Request& request);
  static void corrupt(const Request& request, RoomPart& part, std::uint32_t buffer, const Interval& tokens);
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
