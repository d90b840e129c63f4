#pragma once
// Lowers the part of a chunk that goes by puts into segments, each contiguous at the destination. Rows that
// are strided at the source come as several source spans, to be packed into one staging slot; pieces that are
// worth a write of their own come as one span and go straight from the pool. What is strided at the
// destination (slices of rows, or rows of several DCP ranks) cannot be written this way without one put per
// row; it goes by blocks instead. Pure; the job and the remote pool outlive the cutter.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "common/base/result.h"
#include "transport/fabric.h"
#include "transport/ucx/put_limits.h"
#include "transport/ucx/wire.h"

namespace kvferry::ucx {

struct PutSegment {
  std::uint64_t remote = 0;  // address at the peer
  std::uint32_t region = 0;  // of the remote pool
  std::uint64_t bytes = 0;
  std::vector<std::span<const std::byte>> spans;  // more than one: pack
};

/// Which buffer pairs of a plan go by puts: those whose slices fill whole destination rows, where the rows
/// follow each other at the destination for long enough that puts are no more than blocks would be.
class PutChoice {
 public:
  explicit PutChoice(const Plan& plan) {
    std::uint64_t next = 0;
    for (const RowRun& run : plan.runs) {
      const bool dense = run.dst_step == run.rows;
      stretches_ += dense ? (stretches_ > 0 && run.dst_row == next ? 0 : 1) : run.count;
      next = run.dst_row + std::uint64_t{run.count - 1} * run.dst_step + run.rows;
      rows_ += std::uint64_t{run.count} * run.rows;
    }
  }

  bool by_puts(const BufferPair& pair) const {
    return pair.dst_offset == 0 && pair.bytes == pair.dst_row_bytes && stretches_ > 0 &&
           rows_ / stretches_ * pair.bytes >= kPutModeBlocks.payload_bytes_max;
  }

 private:
  std::uint64_t rows_ = 0;
  std::uint64_t stretches_ = 0;  // of destination rows that follow each other
};

/// `job` without the pairs that go by puts: what is left for the block path (aux included).
ChunkJob block_part(const ChunkJob& job);

/// Every destination row of the job's put pairs lies in the remote pool, and rows are as wide as planned.
Result<void> check_puts(const ChunkJob& job, const RemotePool& pool);

class PutCutter {
 public:
  PutCutter(const ChunkJob& job, const RemotePool& pool, const PutLimits& limits);
  /// Fills `segment` (reusing its capacity); false at the end.
  bool next(PutSegment& segment);

 private:
  bool take(PutSegment& segment);
  void skip_pairs();
  void advance(std::uint32_t rows);

  const ChunkJob* job_;
  const RemotePool* pool_;
  PutLimits limits_;
  PutChoice choice_;
  std::size_t pair_ = 0;
  std::size_t run_ = 0;
  std::uint32_t piece_ = 0;
  std::uint32_t row_ = 0;
};

}  // namespace kvferry::ucx
