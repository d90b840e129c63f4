#pragma once
// One chunk's copies from a source pool to a destination pool in this process' address space, checked against
// both pools and cut into slices. The rows of a plan are numbered 0..rows over all runs; a slice is a range
// of pairs and a range of rows, so cutting is arithmetic whatever the number of runs.

#include <cstdint>
#include <memory>
#include <vector>

#include "common/base/result.h"
#include "common/plan/plan.h"
#include "common/pool/pool.h"

namespace kvferry::shm {

class CopyWork {
 public:
  /// Checks every row and byte of `plan` against the two pools. kInvalid names needed and limit.
  static Result<std::shared_ptr<CopyWork>> make(std::shared_ptr<const Plan> plan,
                                                std::shared_ptr<const Pool> source,
                                                std::shared_ptr<const Pool> destination,
                                                std::uint64_t slice_bytes);

  std::uint64_t slices() const { return slices_; }
  std::uint64_t bytes() const { return bytes_; }
  /// Contiguous pieces that all slices together copy.
  std::uint64_t blocks() const { return blocks_; }

  /// Copies slice `index` and makes its bytes visible to other processes. Any thread; slices are independent.
  void copy(std::uint64_t index) const;

 private:
  CopyWork() = default;
  void copy_rows(const BufferPair& pair, std::uint64_t first, std::uint64_t end) const;

  std::shared_ptr<const Plan> plan_;
  std::shared_ptr<const Pool> source_;
  std::shared_ptr<const Pool> destination_;  // stays mapped while any copy may run
  std::vector<std::uint64_t> run_starts_;    // first row number of each run, and the end
  std::uint64_t slices_ = 0;
  std::uint64_t slices_per_pair_ = 1;
  std::uint64_t pairs_per_slice_ = 1;  // above 1 only when slices_per_pair_ is 1
  std::uint64_t rows_per_slice_ = 0;
  std::uint64_t bytes_ = 0;
  std::uint64_t blocks_ = 0;
};

}  // namespace kvferry::shm
