#include "transport/ucx/put_cutter.h"

#include <algorithm>

#include "common/base/check.h"

namespace kvferry::ucx {

ChunkJob block_part(const ChunkJob& job) {
  ChunkJob rest = job;
  const PutChoice choice(*job.plan);
  auto plan = std::make_shared<Plan>();
  for (const BufferPair& pair : job.plan->pairs) {
    if (!choice.by_puts(pair)) {
      plan->pairs.push_back(pair);
      plan->bytes += job.plan->rows * pair.bytes;
    }
  }
  if (!plan->pairs.empty()) {
    plan->runs = job.plan->runs;
    plan->rows = job.plan->rows;
  }
  rest.plan = std::move(plan);
  return rest;
}

Result<void> check_puts(const ChunkJob& job, const RemotePool& pool) {
  std::uint64_t rows = 0;
  for (const RowRun& run : job.plan->runs) {
    const std::uint64_t last = std::uint64_t{run.count - 1} * run.dst_step + run.rows;
    if (run.dst_row > UINT64_MAX - last) {
      return fail(Code::kInvalid, "plan run wraps around at destination row {}", run.dst_row);
    }
    rows = std::max(rows, run.dst_row + last);
  }
  const PutChoice choice(*job.plan);
  for (const BufferPair& pair : job.plan->pairs) {
    if (!choice.by_puts(pair)) {
      continue;
    }
    if (pair.dst_buffer >= pool.buffers.size()) {
      return fail(Code::kInvalid, "plan names destination buffer {}, but decode rank {} has {}",
                  pair.dst_buffer, pool.rank, pool.buffers.size());
    }
    const auto& buffer = pool.buffers[pair.dst_buffer];
    if (pair.dst_row_bytes != buffer.row_bytes || rows > buffer.rows) {
      return fail(
          Code::kInvalid,
          "plan writes {} rows of {} bytes into buffer {} of decode rank {}, which has {} rows of {} bytes",
          rows, pair.dst_row_bytes, pair.dst_buffer, pool.rank, buffer.rows, buffer.row_bytes);
    }
  }
  return {};
}

PutCutter::PutCutter(const ChunkJob& job, const RemotePool& pool, const PutLimits& limits)
    : job_(&job), pool_(&pool), limits_(limits), choice_(*job.plan) {
  if (job.plan->runs.empty()) {
    pair_ = job.plan->pairs.size();
  }
  skip_pairs();
}

void PutCutter::skip_pairs() {
  const auto& pairs = job_->plan->pairs;
  while (pair_ < pairs.size() && !choice_.by_puts(pairs[pair_])) {
    ++pair_;
  }
}

bool PutCutter::next(PutSegment& segment) {
  segment.spans.clear();
  segment.bytes = 0;
  if (pair_ >= job_->plan->pairs.size()) {
    return false;
  }
  const std::size_t pair = pair_;
  while (pair_ == pair && take(segment)) {
  }
  KVF_CHECK(segment.bytes > 0);
  return true;
}

/// Adds the next source span to the segment; false when it does not belong or does not fit.
bool PutCutter::take(PutSegment& segment) {
  const BufferPair& pair = job_->plan->pairs[pair_];
  const RowRun& run = job_->plan->runs[run_];
  const auto& buffer = pool_->buffers[pair.dst_buffer];
  const std::uint64_t dst_row = run.dst_row + std::uint64_t{piece_} * run.dst_step + row_;
  const std::uint64_t remote = buffer.base + dst_row * buffer.row_bytes;
  const std::uint64_t src_row = run.src_row + std::uint64_t{piece_} * run.src_step + row_;
  const std::byte* from =
      job_->source->buffer(pair.src_buffer).data() + src_row * pair.src_row_bytes + pair.src_offset;
  const bool whole_rows = pair.bytes == pair.src_row_bytes;
  std::uint64_t rows = whole_rows ? run.rows - row_ : 1;
  std::uint64_t room = std::max<std::uint64_t>(limits_.put_bytes_max, pair.bytes);
  bool joins = false;
  if (segment.spans.empty()) {
    segment.remote = remote;
    segment.region = buffer.region;
  } else {
    if (remote != segment.remote + segment.bytes) {
      return false;
    }
    joins = segment.spans.back().data() + segment.spans.back().size() == from;
    const bool direct = joins && segment.spans.size() == 1;
    const bool large = segment.spans.size() == 1 && segment.bytes >= kDirectBytesMin;
    if (!direct && (large || (!joins && rows * pair.bytes >= kDirectBytesMin))) {
      return false;
    }
    const std::uint64_t limit = direct ? limits_.put_bytes_max : limits_.slot_bytes;
    room = limit > segment.bytes ? limit - segment.bytes : 0;
  }
  rows = std::min<std::uint64_t>(rows, room / pair.bytes);
  if (rows == 0) {
    return false;
  }
  const std::uint64_t bytes = rows * pair.bytes;
  if (joins) {
    segment.spans.back() = {segment.spans.back().data(), segment.spans.back().size() + bytes};
  } else {
    segment.spans.emplace_back(from, bytes);
  }
  segment.bytes += bytes;
  advance(static_cast<std::uint32_t>(rows));
  return true;
}

void PutCutter::advance(std::uint32_t rows) {
  const RowRun& run = job_->plan->runs[run_];
  row_ += rows;
  if (row_ < run.rows) {
    return;
  }
  row_ = 0;
  if (++piece_ < run.count) {
    return;
  }
  piece_ = 0;
  if (++run_ < job_->plan->runs.size()) {
    return;
  }
  run_ = 0;
  ++pair_;
  skip_pairs();
}

}  // namespace kvferry::ucx
