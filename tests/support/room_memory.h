#pragma once
// What the ranks of a RoomWorld hold: pools, the bytes of one use of a room in them, and rows that must stay
// as they are because nobody owns them.

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "common/plan/plan.h"
#include "common/pool/pool.h"

namespace kvferry::test {

inline constexpr std::byte kRoomGuard{0xA5};
inline constexpr std::uint32_t kAuxSlots = 64;

/// One rank of one side.
struct RoomRank {
  ModelGeometry model;  // state tensors of one block and outer 1
  Topology topology;
  RankIndex rank = 0;
  std::shared_ptr<Pool> pool;
};

/// A rank whose pool has `pages` pages (state slots) and two aux fields; every byte is kRoomGuard.
RoomRank make_room_rank(const ModelGeometry& model, const Topology& topology, RankIndex rank,
                        std::uint32_t page_size, std::uint64_t pages);
bool has_tokens(const RoomRank& rank);
bool has_state(const RoomRank& rank);
bool has_window(const RoomRank& rank);
/// From the rank's first layer to behind its last.
Interval layers_of(const RoomRank& rank);

/// Where one use of a room lies on a rank.
struct RoomRows {
  std::uint64_t use = 0;
  std::vector<std::uint32_t> pages;
  std::uint64_t first = 0;  // the token of pages[0]
  std::optional<std::uint32_t> state_slot;
  std::vector<std::uint32_t> window_pages = {};
  std::uint64_t window_first = 0;  // the token of window_pages[0]
  Interval window = {};            // tokens of sliding-window layers
};

inline constexpr Interval kAllLayers{0, UINT32_MAX};

/// Writes the bytes of the tokens in those layers and, whatever their layer, of the window and, where `rows`
/// has a slot, of the state.
void fill_rows(const RoomRank& rank, const RoomRows& rows, const Interval& tokens,
               const Interval& layers = kAllLayers);
/// What is wrong with them; empty when nothing is.
std::string wrong_rows(const RoomRank& rank, const RoomRows& rows, const Interval& tokens);

/// Pages, state slots and aux slots that went back to their engine: no byte may land in them.
class Watch {
 public:
  /// Overwrites them with the guard and looks after them from now on.
  void add(const RoomRank& rank, const RoomRows& rows, int aux_slot);
  void remove_page(std::uint32_t page) {
    places_.erase({RowSpace::kTokens, page});
    places_.erase({RowSpace::kDraft, page});
  }
  void remove_window_page(std::uint32_t page) { places_.erase({RowSpace::kWindow, page}); }
  void remove_state(std::uint32_t slot) { places_.erase({RowSpace::kState, slot}); }
  void remove_aux(int slot) { aux_slots_.erase(slot); }
  /// Adds a sentence for each that changed, and restores it.
  void check(const RoomRank& rank, std::vector<std::string>& violations);

 private:
  std::set<std::pair<RowSpace, std::uint32_t>> places_;
  std::set<int> aux_slots_;
};

}  // namespace kvferry::test
