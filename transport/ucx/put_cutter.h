#pragma once
// Lowers the part of a chunk that goes by puts into segments, each contiguous at the destination. Rows that
// are strided at the source come as several source spans, to be packed into one staging slot; pieces that are
// worth a write of their own come as one span and go straight from the pool. A pair whose slices are strided
// at the destination cannot be written this way without one put per row; such pairs go by blocks instead.
// Pure; the job and the remote pool outlive the cutter.

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

/// True when the pair's slices fill whole destination rows.
constexpr bool goes_by_puts(const BufferPair& pair) {
  return pair.dst_offset == 0 && pair.bytes == pair.dst_row_bytes;
}

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
  std::size_t pair_ = 0;
  std::size_t run_ = 0;
  std::uint32_t piece_ = 0;
  std::uint32_t row_ = 0;
};

}  // namespace kvferry::ucx
