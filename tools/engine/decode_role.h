#pragma once
// The decode side of the synthetic engine. A room gets pages on every rank, all of their bytes are filled
// with the guard pattern, and every rank's daemon is told to expect it. When a rank has landed, every byte of
// its pages and of its aux row is compared with what must be there, and only then do the pages return.

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <unordered_map>

#include "tools/engine/role.h"
#include "tools/engine/room_parts.h"

namespace kvferry {

class DecodeRole : public EngineRole {
 public:
  /// `ranks` and `sink` outlive the role.
  DecodeRole(RoleOptions options, std::span<Rank> ranks, EventSink& sink)
      : options_(std::move(options)), ranks_(ranks), sink_(sink) {}

  Result<void> on_command(const std::string& op, const nlohmann::json& command) override;
  void on_event(Rank& rank, const kvf_event& event, Instant now) override;
  void on_lost(Rank& rank, const std::string& reason) override;
  bool work(Instant now) override;
  bool waits_for_retry() const override;

 private:
  struct Expectation {
    RoomState state;
    std::string bootstrap;
    std::size_t guard_part = 0;  // next step of the guard fill
    std::uint32_t guard_buffer = 0;
    std::size_t next_expect = 0;  // parts before it were accepted by their daemons
    Instant retry_at{};
    std::deque<std::size_t> landed;  // parts to compare, in order of landing
    std::uint32_t check_buffer = 0;
    RowReport report;
    AuxReport aux;
    std::uint64_t landed_at_ns = 0;
    bool guarded() const { return guard_part == state.parts.size(); }
  };

  Result<void> expect(const nlohmann::json& command);
  void guard_step(Expectation& room);
  bool expect_step(Expectation& room, Instant now);
  void check_step(Expectation& room);
  void on_landed(Expectation& room, RoomPart& part, const kvf_event& event, Instant now);
  void finish(Room room);

  RoleOptions options_;
  std::span<Rank> ranks_;
  EventSink& sink_;
  std::unordered_map<Room, Expectation> rooms_;
  std::deque<Room> turns_;  // rooms take turns, one step each
};

}  // namespace kvferry
