#pragma once
// One engine of the abort storm: a rank with one fixed set of pages, which are dealt out anew for each round.
// Room A has all of them, the room after it every second one; the rest is watched.

#include <chrono>
#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "common/base/hash.h"
#include "tools/cli/demo/demo_options.h"
#include "tools/engine/rank.h"

namespace kvferry {

/// The end of a room as its engine was told.
struct StormEnd {
  std::uint32_t type = KVF_EVENT_NONE;
  Instant at{};
  std::string reason;

  bool landed() const { return type == KVF_EVENT_LANDED; }
};

class StormSide {
 public:
  static Result<StormSide> create(const RankOptions& options, Side side);

  /// False: the daemon does not listen yet.
  Result<bool> attach() { return rank_.attach(std::chrono::steady_clock::now()); }
  /// Another order of the pages, and so other ones for the next room.
  void deal(std::mt19937_64& random);

  std::span<const std::uint32_t> pages() const { return held_.pages; }
  const std::vector<std::uint32_t>& given() const { return given_; }
  const std::vector<std::uint32_t>& watched() const { return watched_; }
  std::uint64_t tokens_of(std::span<const std::uint32_t> pages) const {
    return pages.size() * rank_.rows.page_size();
  }
  std::uint64_t token_bytes() const;
  std::uint32_t buffers() const { return static_cast<std::uint32_t>(rank_.rows.buffers().size()); }
  /// The first row of a page.
  const volatile std::byte* first_row(std::uint32_t buffer, std::uint32_t page) const;

  void fill(Room room, std::span<const std::uint32_t> pages);
  void fill_guard();
  RowReport check(Room room, std::span<const std::uint32_t> pages) const;
  AuxReport check_aux_row(Room room) const;
  /// How many bytes of the pages are not the guard's.
  std::uint64_t written(std::span<const std::uint32_t> pages) const;
  std::uint64_t hash_watched() const;

  /// Prefill: the tokens of `pages` in `chunks` chunks, of which the last `withheld` are not sent.
  Result<void> send(Room room, std::span<const std::uint32_t> pages, std::uint32_t chunks,
                    std::uint32_t withheld);
  Result<void> expect(Room room, std::span<const std::uint32_t> pages, const std::string& bootstrap);
  void abort(Room room);
  /// Reads what the daemon has said: the end of `room` when it has come. An error is an event that may not
  /// be.
  Result<std::optional<StormEnd>> poll(Room room);

 private:
  StormSide(Rank rank, Side side) : rank_(std::move(rank)), side_(side) {}
  RoomRows rows(Room room, std::span<const std::uint32_t> pages) const;
  template <class Call>
  Result<void> insist_on(const char* name, Call call);

  Rank rank_;
  Side side_;
  Holding held_;
  std::vector<std::uint32_t> given_;
  std::vector<std::uint32_t> watched_;
};

}  // namespace kvferry
