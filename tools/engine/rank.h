#pragma once
// One rank of the synthetic engine: its rows, memory, allocators and its connection to the daemon, which
// comes back by itself after the daemon was restarted. One thread.

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "common/base/result.h"
#include "common/engine/kvferry.h"
#include "tools/engine/page_allocator.h"
#include "tools/engine/rank_memory.h"
#include "tools/engine/rank_rows.h"

namespace kvferry {

using Instant = std::chrono::steady_clock::time_point;

struct RankOptions {
  std::string socket;
  ModelGeometry model;
  Topology topology;
  std::uint32_t page_size = 64;
  std::uint32_t pages = 0;
  std::uint32_t rooms = 16;  // alive at once: window pages and state slots
  std::uint32_t aux_slots = 64;
  bool scatter = true;
  std::uint64_t seed = 1;
};

/// What a room holds on one rank.
struct Holding {
  std::vector<std::uint32_t> pages;
  std::vector<std::uint32_t> window_pages;
  std::int32_t state_slot = -1;
  std::int32_t slot = -1;  // aux
};

class Rank {
 public:
  static Result<Rank> create(const RankOptions& options, RankIndex index);
  ~Rank();
  Rank(Rank&& other) noexcept;
  Rank& operator=(Rank&&) = delete;

  /// Attaches when `now` has reached next_attempt(). True: attached just now. An error is a refusal that
  /// repeating cannot cure; a daemon that is not there yet is no error, only a later next_attempt(). Nor are
  /// pages that still rest: the next daemon would give the pool to writers anew, and nobody could tell the
  /// old ones from them.
  Result<bool> attach(Instant now);
  /// Forgets the connection (it is gone already) and tries again soon.
  void lost(Instant now);
  bool attached() const { return engine_ != nullptr; }
  Instant next_attempt() const { return next_attempt_; }
  kvf_engine* engine() const { return engine_; }

  /// Pages whose daemon died with the room alive. A peer on this host may hold a mapping of the pool and be
  /// in the middle of a copy that nobody waits for any more, so they rest until no writer is left.
  void quarantine(Holding holding);
  /// Gives rested pages back.
  void end_quarantine(Instant now);
  /// Everything that tokens [prefix, end) of a room need, or nothing and the reason.
  Result<Holding> allocate(Room room, std::uint64_t prefix, std::uint64_t end);
  /// Of a room whose final event has come.
  void release(const Holding& holding);

  RankIndex index() const { return rows.rank(); }
  const RankCoord& coord() const { return coord_; }
  std::uint32_t quarantined_pages() const;

  RankRows rows;
  RankMemory memory;
  PageAllocator pages;
  PageAllocator windows;
  PageAllocator states;
  PageAllocator slots;

 private:
  Rank(RankRows rows_in, RankMemory memory_in, const RankOptions& options);

  std::string socket_;
  std::string dtype_;
  std::string last_refusal_;
  RankCoord coord_;
  std::uint32_t page_size_ = 0;
  kvf_engine* engine_ = nullptr;
  Instant next_attempt_{};
  std::chrono::milliseconds back_off_{0};
  Instant lost_at_{};
  std::vector<Holding> resting_;
};

}  // namespace kvferry
