#pragma once
// The router's view of the demo's rooms: which requests are under way, what both engines have said about
// each, and the pages that they hold on either side. Pure: events in, facts out.

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tools/cli/demo/demo_options.h"
#include "tools/cli/demo/demo_results.h"
#include "tools/cli/demo/trace.h"

namespace kvferry {

using Instant = std::chrono::steady_clock::time_point;

/// How a room ended on one side.
struct RoomEnding {
  bool landed = false;
  std::string reason;  // of a room that did not land
  nlohmann::json event;
};

struct DemoRoom {
  Room room = 0;
  std::uint64_t tokens = 0;
  std::uint64_t prefix = 0;
  bool alone = false;        // nothing else runs, and prefill fills everything before it sends
  bool started = false;      // prefill's daemon has the first chunk
  bool granted = false;      // and has been granted pages for it by decode's
  bool expected = false;     // decode's daemon has the expectation of every rank
  bool hit_by_kill = false;  // alive when the demo killed a daemon
  bool cut_by_kill = false;  // and transferring then
  bool aborted_by_us = false;
  std::optional<RoomEnding> endings[2];
  Instant first_ending{};
  Instant last_ending{};

  std::optional<RoomEnding>& ending(Side side) { return endings[static_cast<int>(side)]; }
  bool ended() const { return endings[0] && endings[1]; }
  bool transfers() const { return started && expected && granted && !endings[0] && !endings[1]; }
};

/// What one request of the trace becomes: its prefix hit rounded down to whole virtual pages, and its length
/// clipped to what the pools hold.
struct Admission {
  std::uint64_t tokens = 0;
  std::uint64_t prefix = 0;
  bool clipped = false;
};
Admission admit(const TraceRequest& request, std::uint64_t hit_tokens, std::uint64_t unit_tokens,
                std::uint64_t pool_tokens);

class DemoRooms {
 public:
  DemoRooms(const DemoLayout& layout, const PoolSizes& pools, std::uint64_t seed);

  /// A room for the tokens, if both sides have pages for it: with pages reserved. Room ids never repeat.
  std::optional<Room> open(std::uint64_t tokens, std::uint64_t prefix);
  /// Takes one engine event; returns the room when it has just ended on both sides (it stays until close()).
  std::optional<Room> on_event(Side side, const nlohmann::json& event, Instant now);
  void close(Room room);

  DemoRoom& at(Room room) { return rooms_.at(room); }
  std::map<Room, DemoRoom>& all() { return rooms_; }
  const std::map<Room, DemoRoom>& all() const { return rooms_; }
  std::size_t size() const { return rooms_.size(); }
  /// Adds a room that has landed on both sides to the results.
  void account(const DemoRoom& room, DemoResults& results) const;

 private:
  std::uint64_t& free_pages(Side side, Room room);

  DemoLayout layout_;
  std::uint64_t random_;
  std::map<Room, DemoRoom> rooms_;
  std::vector<std::uint64_t> free_[2];  // by DP group
};

}  // namespace kvferry
