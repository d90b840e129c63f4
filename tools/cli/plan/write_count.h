#pragma once
// How many writes each fabric would post for the rows of one plan (aux rows and notices come on top), without
// memory, pools or tokens: the cutters of the
// fabrics (BlockCutter, PutCutter, CopyWork) in numbers. Costs O(runs + writes) per kind of buffer pair;
// within a run the pieces that a write surely takes are counted in one step.

#include <cstdint>

#include "common/plan/plan.h"
#include "transport/block_cutter.h"
#include "transport/ucx/put_limits.h"

namespace kvferry {

struct WriteCount {
  std::uint64_t copies = 0;        // shm: contiguous pieces
  std::uint64_t blocks = 0;        // tcp, and every fabric whose receiver places the bytes
  std::uint64_t puts = 0;          // ucx over RDMA, blocks for what puts cannot write included
  std::uint64_t packed_bytes = 0;  // of the puts: bytes that go through staging
};

struct WriteLimits {
  CutLimits blocks;
  ucx::PutLimits puts;
};

WriteCount count_writes(const Plan& plan, const WriteLimits& limits);

}  // namespace kvferry
