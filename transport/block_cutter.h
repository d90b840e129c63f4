#pragma once
// Lowers one chunk into blocks, a block at a time: for each buffer pair the plan's runs in order, then the
// aux fields. Runs that continue each other in the destination's granted rows share a block; source rows that
// follow each other in memory share a span. State is O(1) per chunk, whatever the plan's size.
// Single-threaded. The job must outlive the cutter; spans point into its source pool and aux bytes.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "common/base/result.h"
#include "transport/block.h"
#include "transport/fabric.h"

namespace kvferry {

struct CutLimits {
  std::uint64_t payload_bytes_max = 1 << 20;  // a single row may exceed it: rows are never divided
  std::uint32_t spans_max = 1000;             // source spans per block, at least 1
};

struct CutBlock {
  BlockHeader header;
  std::vector<std::span<const std::byte>> spans;  // the payload, in order; payload_bytes in all
};

/// Everything a fabric relies on: the source pool has the plan's buffers and rows, row widths agree. Errors
/// are kInvalid. O(runs + pairs). Call it once per job, before cutting.
Result<void> check_job(const ChunkJob& job);

class BlockCutter {
 public:
  BlockCutter(const ChunkJob& job, const CutLimits& limits);

  /// Fills `block` (reusing its capacity) with the next block; false at the end.
  bool next(CutBlock& block);
  bool done() const;
  /// Payload bytes and blocks handed out so far.
  std::uint64_t bytes() const { return bytes_; }
  std::uint64_t blocks() const { return blocks_; }

 private:
  bool next_rows(CutBlock& block);
  void next_aux(CutBlock& block);
  bool extend(BlockHeader& header, std::uint64_t dst_index, std::uint32_t rows) const;
  void advance(std::uint32_t rows);

  const ChunkJob* job_;
  CutLimits limits_;
  std::size_t pair_ = 0;
  std::size_t run_ = 0;
  std::uint32_t piece_ = 0;  // of the run
  std::uint32_t row_ = 0;    // of the piece
  std::size_t aux_ = 0;
  std::uint64_t bytes_ = 0;
  std::uint64_t blocks_ = 0;
};

}  // namespace kvferry
