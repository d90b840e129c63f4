#pragma once
// What the rooms of a cell cost without daemons: the planner's rows, copied from the source pools to the
// destination pools of this process. The yardstick of every fabric, and checked like one.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "common/base/result.h"
#include "common/plan/plan.h"
#include "tools/cli/bench/bench_side.h"

namespace kvferry {

/// `count` pieces of `piece_bytes`, each a stride further on.
struct StridedCopy {
  std::byte* dst = nullptr;
  const std::byte* src = nullptr;
  std::size_t piece_bytes = 0;
  std::size_t count = 1;
  std::size_t dst_stride = 0;
  std::size_t src_stride = 0;
};

/// Appends what `plan` copies between the buffers of the two ranks, buffer by buffer, in as few pieces as its
/// rows allow.
void append_copies(const Plan& plan, const RankMemory& src, const RankMemory& dst,
                   std::vector<StridedCopy>& copies);

class CopyList {
 public:
  /// Plans each room as the daemons do, in one chunk. Borrows the memory of both sides.
  static Result<CopyList> create(const DemoLayout& layout, const BenchSide& prefill, const BenchSide& decode,
                                 std::span<const BenchRoom> rooms);

  std::uint64_t bytes() const { return bytes_; }
  /// Bytes of each room, in their order.
  const std::vector<std::uint64_t>& room_bytes() const { return room_bytes_; }
  std::uint64_t pieces() const;

  /// One memcpy for each piece, on this thread.
  void copy_with_memcpy() const;
  /// The copy kernel (non-temporal stores) on `threads` threads.
  void copy_with_kernel(unsigned threads) const;

 private:
  std::vector<StridedCopy> copies_;
  std::vector<std::uint64_t> room_bytes_;
  std::uint64_t bytes_ = 0;
};

}  // namespace kvferry
