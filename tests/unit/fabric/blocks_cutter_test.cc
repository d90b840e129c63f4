#include <catch2/catch.hpp>

#include <algorithm>
#include <cstring>

#include "tests/support/fabric_fixture.h"
#include "tests/support/rng.h"
#include "transport/block_cutter.h"
#include "transport/grant_table.h"

using namespace kvferry;
using namespace kvferry::test;

namespace {

PoolLayout layout_of(std::uint32_t page_size, std::uint64_t pages,
                     std::initializer_list<std::uint32_t> row_bytes) {
  PoolLayout layout;
  layout.page_size = page_size;
  std::uint64_t offset = 100;
  for (const std::uint32_t bytes : row_bytes) {
    layout.buffers.push_back(BufferPlace{BufferShape{0, BufferKind::kKey, bytes, pages}, 0, offset});
    offset += pages * page_size * bytes + 100;
  }
  return layout;
}

void randomise(const Pool& pool, Rng& random) {
  for (std::uint32_t b = 0; b < pool.buffer_count(); ++b) {
    for (std::byte& byte : pool.buffer(b)) {
      byte = static_cast<std::byte>(random.next());
    }
  }
}

/// Runs that never write a row twice: destination rows are dealt out in ascending order.
std::vector<RowRun> random_runs(Rng& random, std::uint64_t src_rows, std::uint64_t dst_rows) {
  std::vector<RowRun> runs;
  std::uint64_t index = random.below(4);
  while (index < dst_rows && runs.size() < 40) {
    RowRun run;
    run.rows = random.between32(1, 5);
    run.count = random.between32(1, 9);
    run.dst_step = run.rows + (random.below(2) != 0 ? 0 : random.between32(0, 4));
    run.src_step = random.between32(0, 12);
    run.dst_index = index;
    const std::uint64_t dst_end = index + std::uint64_t{run.count - 1} * run.dst_step + run.rows;
    const std::uint64_t src_extent = std::uint64_t{run.count - 1} * run.src_step + run.rows;
    if (dst_end > dst_rows || src_extent > src_rows) {
      break;
    }
    run.src_row = random.below(src_rows - src_extent + 1);
    runs.push_back(run);
    index = dst_end + (random.below(2) != 0 ? 0 : random.below(6));
  }
  return runs;
}

}  // namespace

TEST_CASE("blocks cut from any plan and placed by the table equal the naive row loop") {
  // Claim: cutter and placement together move exactly the plan's bytes, for any limits. Oracle: three loops.
  const auto seed = test_seed(0x10C4);
  INFO("seed " << seed);
  Rng random(seed);
  for (int round = 0; round < 150; ++round) {
    INFO("round " << round);
    const auto source = make_pool(layout_of(4, 40, {24, 64}), kSrcGuard);
    const auto target = make_pool(layout_of(8, 30, {48, 64}), kDstGuard);
    randomise(*source, random);
    auto plan = std::make_shared<Plan>();
    plan->runs = random_runs(random, 160, 25 * 8);
    plan->pairs = {BufferPair{0, 0, 24, 48, 8, 32, 16}, BufferPair{1, 1, 64, 64, 0, 0, 64}};
    auto pages = std::make_shared<std::vector<std::uint32_t>>();
    for (std::uint32_t page = 0; page < 30; ++page) {
      pages->push_back(page);
    }
    for (std::size_t i = 0; i < 8; ++i) {
      std::swap((*pages)[random.below(30)], (*pages)[random.below(30)]);
    }
    pages->resize(25);

    std::vector<std::vector<std::byte>> expected;
    for (std::uint32_t b = 0; b < 2; ++b) {
      expected.emplace_back(target->buffer(b).begin(), target->buffer(b).end());
    }
    std::uint64_t expected_bytes = 0;
    for (const BufferPair& pair : plan->pairs) {
      for (const RowRun& run : plan->runs) {
        for (std::uint64_t k = 0; k < std::uint64_t{run.count} * run.rows; ++k) {
          const std::uint64_t piece = k / run.rows;
          const std::uint64_t src = run.src_row + piece * run.src_step + k % run.rows;
          const std::uint64_t index = run.dst_index + piece * run.dst_step + k % run.rows;
          const std::uint64_t dst = (*pages)[index / 8] * 8ull + index % 8;
          std::memcpy(expected[pair.dst_buffer].data() + dst * pair.dst_row_bytes + pair.dst_offset,
                      source->buffer(pair.src_buffer).data() + src * pair.src_row_bytes + pair.src_offset,
                      pair.bytes);
          expected_bytes += pair.bytes;
        }
      }
    }

    GrantTable table;
    table.add_pool(target);
    Grant grant;
    grant.key = GrantKey{3, 1, 0};
    grant.pages = pages;
    grant.sources = {{0, 9}};
    REQUIRE(table.open(grant).has_value());
    ChunkJob job;
    job.key = TransferKey{grant.key, 0};
    job.plan = plan;
    job.source = source;
    REQUIRE(check_job(job).has_value());
    CutLimits limits;
    limits.payload_bytes_max = random.between(1, 700);
    limits.spans_max = random.between32(1, 12);
    BlockCutter cutter(job, limits);
    CutBlock block;
    while (cutter.next(block)) {
      BlockBytes wire;
      encode_block(block.header, wire);
      const auto header = decode_block(wire);
      REQUIRE(header.has_value());
      REQUIRE(block.spans.size() <= limits.spans_max);
      REQUIRE((header->payload_bytes <= limits.payload_bytes_max || header->rows * header->count == 1));
      std::vector<std::byte> payload;
      for (const auto span : block.spans) {
        payload.insert(payload.end(), span.begin(), span.end());
      }
      REQUIRE(payload.size() == header->payload_bytes);
      auto placement = table.admit(*header, 9);
      REQUIRE(placement.has_value());
      std::size_t at = 0;
      for (auto span = placement->next(); !span.empty(); span = placement->next()) {
        std::copy_n(payload.begin() + static_cast<std::ptrdiff_t>(at), span.size(), span.begin());
        at += span.size();
      }
      REQUIRE(at == payload.size());
      REQUIRE(table.arrived(*header, 9).has_value());
    }
    CHECK(cutter.done());
    CHECK(cutter.bytes() == expected_bytes);
    for (std::uint32_t b = 0; b < 2; ++b) {
      REQUIRE(std::equal(expected[b].begin(), expected[b].end(), target->buffer(b).begin()));
    }
    const auto landed = table.notice(make_notice(job.key, cutter.bytes(), cutter.blocks()), 9);
    REQUIRE(landed.has_value());
    CHECK(landed->has_value());
  }
}

TEST_CASE("runs that continue each other share a block and its spans") {
  const auto source = make_pool(layout_of(4, 40, {64}), kSrcGuard);
  auto plan = std::make_shared<Plan>();
  plan->pairs = {BufferPair{0, 0, 64, 64, 0, 0, 64}};
  SECTION("whole pages at scattered sources: one block, one span each") {
    plan->runs = {RowRun{40, 0, 0, 4, 1, 4, 4}, RowRun{8, 0, 4, 4, 1, 4, 4}, RowRun{12, 0, 8, 4, 1, 4, 4}};
    ChunkJob job{TransferKey{{3, 1, 0}, 0}, plan, source, {}, 0, false, 0};
    BlockCutter cutter(job, CutLimits{});
    CutBlock block;
    REQUIRE(cutter.next(block));
    CHECK(block.header.rows == 12);
    CHECK(block.header.count == 1);
    CHECK(block.spans.size() == 2);  // rows 8..15 are adjacent
    CHECK_FALSE(cutter.next(block));
  }
  SECTION("every fourth source row, dense at the destination") {
    plan->runs = {RowRun{1, 0, 0, 1, 20, 4, 1}};
    ChunkJob job{TransferKey{{3, 1, 0}, 0}, plan, source, {}, 0, false, 0};
    BlockCutter cutter(job, CutLimits{});
    CutBlock block;
    REQUIRE(cutter.next(block));
    CHECK(block.header.rows == 20);
    CHECK(block.header.count == 1);
    CHECK(block.spans.size() == 20);
  }
  SECTION("dense source rows, every fourth at the destination") {
    plan->runs = {RowRun{0, 0, 2, 1, 20, 1, 4}, RowRun{20, 0, 82, 1, 5, 1, 4}};
    ChunkJob job{TransferKey{{3, 1, 0}, 0}, plan, source, {}, 0, false, 0};
    BlockCutter cutter(job, CutLimits{});
    CutBlock block;
    REQUIRE(cutter.next(block));
    CHECK(block.header.rows == 1);
    CHECK(block.header.count == 25);
    CHECK(block.header.step == 4);
    CHECK(block.spans.size() == 1);
    CHECK_FALSE(cutter.next(block));
  }
}

TEST_CASE("a chunk that reads outside its pool is refused before it is cut") {
  const auto source = make_pool(layout_of(4, 40, {64}), kSrcGuard);
  auto plan = std::make_shared<Plan>();
  plan->pairs = {BufferPair{0, 0, 64, 64, 0, 0, 64}};
  plan->runs = {RowRun{159, 0, 0, 1, 1, 1, 1}};
  ChunkJob job{TransferKey{{3, 1, 0}, 0}, plan, source, {}, 0, false, 0};
  CHECK(check_job(job).has_value());
  const auto refused = [&] {
    const auto result = check_job(job);
    return !result && result.error().code == Code::kInvalid;
  };
  plan->runs[0].src_row = 160;
  CHECK(refused());
  plan->runs[0].src_row = ~std::uint64_t{0};
  CHECK(refused());
  plan->runs[0] = RowRun{0, 0, 0, 1, 41, 4, 1};
  CHECK(refused());
  plan->runs[0] = RowRun{0, 0, 0, 1, 1, 1, 1};
  plan->pairs[0].src_buffer = 1;
  CHECK(refused());
  plan->pairs[0] = BufferPair{0, 0, 64, 64, 32, 0, 64};
  CHECK(refused());
  plan->pairs[0] = BufferPair{0, 0, 32, 64, 0, 0, 32};
  CHECK(refused());
  plan->pairs[0] = BufferPair{0, 0, 64, 64, 0, 0, 64};
  job.aux.push_back(AuxWrite{0, {}});
  CHECK(refused());
}
