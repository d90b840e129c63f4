#pragma once
// A room on one side of the synthetic engine: its part on every rank of its DP group, and the rule that the
// room ends when all parts have ended. A failure of one part ends the others: accepted ones through kvf_abort
// (their pages come back with the final event), the rest at once.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/base/error.h"
#include "common/base/ids.h"
#include "common/base/result.h"
#include "tools/engine/rank.h"

namespace kvferry {

struct RoomPart {
  Rank* rank = nullptr;  // outlives the room
  Holding held;
  bool accepted = false;  // the daemon owns the pages
  bool complete = false;  // prefill: the last chunk was accepted
  bool ended = false;     // pages and slot are given back
  std::uint64_t bytes = 0;
  std::uint64_t transfer_ns = 0;
};

struct RoomState {
  Room room = 0;
  std::uint64_t tokens = 0;
  std::uint64_t prefix = 0;
  std::vector<RoomPart> parts;
  std::optional<Error> failure;  // the first one wins

  RoomRows rows(const RoomPart& part) const;
  /// What kvf_send and kvf_expect take beside the pages; borrows from the part.
  kvf_hybrid hybrid(const RoomPart& part) const;
  bool ended() const;
  RoomPart* part_of(const Rank& rank);
};

/// Pages and one aux slot on every rank of the room's DP group (room modulo dp); all or nothing.
Result<void> allocate_parts(RoomState& state, std::span<Rank> ranks, std::uint32_t dp_size);
/// Gives the part's pages back. Call after its final event only.
void end_part(RoomPart& part);
/// Records the failure and ends or aborts every other part.
void fail_room(RoomState& state, Error error);
/// The rank's daemon is gone: the part's pages rest, and the room fails.
void lose_part(RoomState& state, RoomPart& part, const std::string& reason);

}  // namespace kvferry
