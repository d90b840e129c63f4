#include <catch2/catch.hpp>

#include "tests/support/fabric_fixture.h"
#include "tests/support/rng.h"
#include "tools/cli/plan/write_count.h"
#include "transport/shm/copy_work.h"
#if KVF_HAVE_UCX
#include "transport/ucx/put_cutter.h"
#endif

using namespace kvferry;
using namespace kvferry::test;

namespace {

constexpr std::uint64_t kPages = 40;
constexpr std::uint32_t kPageSize = 8;
constexpr std::uint64_t kRows = kPages * kPageSize;

PoolLayout layout_of(std::initializer_list<std::uint32_t> row_bytes) {
  PoolLayout layout;
  layout.page_size = kPageSize;
  std::uint64_t offset = 0;
  for (const std::uint32_t bytes : row_bytes) {
    layout.buffers.push_back(BufferPlace{BufferShape{0, BufferKind::kKey, bytes, kPages}, 0, offset});
    offset += kRows * bytes;
  }
  return layout;
}

/// Whole rows, slices of the source row, slices of the destination row; rows far below, just below and above
/// the size of a direct put.
const std::vector<BufferPair> kPairs{{0, 0, 48, 24, 8, 0, 24},         {1, 1, 64, 64, 0, 0, 64},
                                     {1, 2, 64, 96, 0, 32, 64},        {0, 2, 48, 96, 24, 8, 24},
                                     {2, 3, 5000, 5000, 0, 0, 5000},   {3, 4, 40000, 20000, 20000, 0, 20000},
                                     {4, 4, 20000, 20000, 0, 0, 20000}};

/// Runs as a planner makes them and worse: dense and strided on each side, single and many, continuing each
/// other and not. Destination rows ascend.
std::vector<RowRun> random_runs(Rng& random) {
  std::vector<RowRun> runs;
  std::uint64_t index = random.below(4);
  std::uint64_t next_source = random.below(kRows);
  const std::uint32_t usual_rows = random.between32(1, 4);
  const std::uint32_t usual_step = usual_rows + random.between32(0, 3);
  while (index < kRows && runs.size() < 30) {
    RowRun run;
    run.rows = random.chance(2, 3) ? usual_rows : random.between32(1, 30);
    run.count = random.chance(1, 3) ? 1 : random.between32(1, 40);
    run.src_step = random.chance(1, 2) ? run.rows : run.rows + random.between32(0, 9);
    run.dst_step = random.chance(1, 2) ? run.rows : std::max(usual_step, run.rows);
    if (run.count == 1) {
      run.src_step = run.dst_step = run.rows;
    }
    const std::uint64_t dst_end = index + std::uint64_t{run.count - 1} * run.dst_step + run.rows;
    const std::uint64_t src_extent = std::uint64_t{run.count - 1} * run.src_step + run.rows;
    if (dst_end > kRows || src_extent > kRows) {
      break;
    }
    const bool continues = random.chance(1, 2) && next_source + src_extent <= kRows;
    run.src_row = continues ? next_source : random.below(kRows - src_extent + 1);
    run.dst_row = run.dst_index = index;
    runs.push_back(run);
    next_source = run.src_row + src_extent;
    index = dst_end + (random.chance(1, 2) ? 0 : random.below(6));
  }
  return runs;
}

std::uint64_t cut_blocks(const ChunkJob& job, const CutLimits& limits) {
  BlockCutter cutter(job, limits);
  CutBlock block;
  while (cutter.next(block)) {
  }
  return cutter.blocks();
}

#if KVF_HAVE_UCX
/// Puts that the cutter makes, and bytes of those that it packs.
std::pair<std::uint64_t, std::uint64_t> cut_puts(const ChunkJob& job, const Pool& target,
                                                 const ucx::PutLimits& limits) {
  ucx::RemotePool remote;
  for (const BufferPlace& buffer : target.layout().buffers) {
    remote.buffers.push_back({0, buffer.offset, kRows, buffer.shape.row_bytes});
  }
  ucx::PutCutter cutter(job, remote, limits);
  ucx::PutSegment segment;
  std::uint64_t puts = 0;
  std::uint64_t packed = 0;
  while (cutter.next(segment)) {
    ++puts;
    packed += segment.spans.size() > 1 ? segment.bytes : 0;
  }
  return {puts, packed};
}
#endif

}  // namespace

TEST_CASE("the counted writes are those that each fabric posts") {
  // Claim: counting whole stretches of a run at once changes no number. Oracle: the fabrics' own cutters, at
  // work on real pools.
  const auto seed = test_seed(0x9147);
  INFO("seed " << seed);
  Rng random(seed);
  const auto source = make_pool(layout_of({48, 64, 5000, 40000, 20000}), kSrcGuard);
  const auto target = make_pool(layout_of({24, 64, 96, 5000, 20000}), kDstGuard);
  for (int round = 0; round < 1500; ++round) {
    INFO("round " << round);
    auto plan = std::make_shared<Plan>();
    plan->runs = random_runs(random);
    for (const BufferPair& pair : kPairs) {
      if (random.chance(1, 2)) {
        plan->pairs.push_back(pair);
      }
    }
    if (plan->runs.empty()) {
      continue;
    }
    WriteLimits limits;
    limits.blocks.payload_bytes_max = random.between(1, random.chance(1, 2) ? 2'000 : 200'000);
    limits.blocks.spans_max = random.between32(1, random.chance(1, 2) ? 8 : 100);
    limits.puts.slot_bytes = random.between(16, random.chance(1, 2) ? 1'000 : 100'000);
    limits.puts.put_bytes_max = random.between(16, random.chance(1, 2) ? 1'000 : 200'000);
    const WriteCount counted = count_writes(*plan, limits);

    ChunkJob job;
    job.key = TransferKey{{3, 1, 0}, 0};
    job.plan = plan;
    job.source = source;
    REQUIRE(check_job(job).has_value());
    REQUIRE(counted.blocks == cut_blocks(job, limits.blocks));
    const auto copies = shm::CopyWork::make(plan, source, target, 1 << 20);
    REQUIRE(copies.has_value());
    REQUIRE(counted.copies == (*copies)->blocks());
#if KVF_HAVE_UCX
    const auto [puts, packed] = cut_puts(job, *target, limits.puts);
    REQUIRE(counted.puts == puts + cut_blocks(ucx::block_part(job), ucx::kPutModeBlocks));
    REQUIRE(counted.packed_bytes == packed);
#endif
  }
}

TEST_CASE("an empty plan posts nothing") {
  const WriteCount counted = count_writes(Plan{}, WriteLimits{});
  CHECK(counted.copies + counted.blocks + counted.puts + counted.packed_bytes == 0);
}
