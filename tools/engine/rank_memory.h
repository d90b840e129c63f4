#pragma once
// The memory of one rank: one memfd, sealed against shrinking, with all buffers in pool order and then the
// aux fields, each on its own operating system page. Populated at creation, so that a machine without enough
// memory refuses here and not with a signal in the middle of a transfer.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/base/result.h"
#include "common/base/unique_fd.h"
#include "common/engine/kvferry.h"
#include "tools/engine/rank_rows.h"

namespace kvferry {

/// The aux schema of the synthetic engine, the same on both sides. Field kAuxRoomIndex starts with the room.
struct AuxFieldShape {
  const char* name;
  std::uint32_t width;
};
inline constexpr AuxFieldShape kAuxSchema[] = {
    {"output_ids", 64}, {"cached_tokens", 64}, {"output_hidden_states", 14336}, {"bootstrap_room", 64}};
inline constexpr std::uint32_t kAuxFields = 4;
inline constexpr std::uint32_t kAuxRoomIndex = 3;

class RankMemory {
 public:
  static Result<RankMemory> create(const RankRows& rows, std::uint32_t aux_slots);
  ~RankMemory();
  RankMemory(RankMemory&& other) noexcept;
  RankMemory& operator=(RankMemory&&) = delete;

  int fd() const { return fd_.get(); }
  std::span<std::byte> buffer(std::uint32_t index) const { return buffers_[index]; }
  std::span<std::byte> aux(std::uint32_t field, std::uint32_t slot) const;
  /// The pool's description for kvf_attach; valid as long as this object and until the next call.
  const std::vector<kvf_buffer>& pool_buffers() const { return pool_buffers_; }
  const std::vector<kvf_aux_field>& pool_aux() const { return pool_aux_; }

 private:
  RankMemory() = default;

  UniqueFd fd_;
  std::byte* base_ = nullptr;
  std::uint64_t bytes_ = 0;
  std::vector<std::span<std::byte>> buffers_;
  std::vector<std::byte*> aux_;
  std::vector<kvf_buffer> pool_buffers_;
  std::vector<kvf_aux_field> pool_aux_;
};

/// Writes what a room's aux row must hold / must not hold yet, and counts the bytes that differ from it.
void fill_aux(const RankMemory& memory, std::uint32_t slot, Room room);
void clear_aux(const RankMemory& memory, std::uint32_t slot);
struct AuxReport {
  std::uint64_t compared = 0;
  std::uint64_t differing = 0;
  std::string first;  // "field output_ids byte 3: expected 0x12, found 0x00"
};
AuxReport check_aux(const RankMemory& memory, std::uint32_t slot, Room room);

}  // namespace kvferry
