#include "transport/block_cutter.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "common/base/check.h"

namespace kvferry {
namespace {

/// Appends a source span, joined with the last one where it continues it in memory.
void append(std::vector<std::span<const std::byte>>& spans, const std::byte* begin, std::size_t bytes) {
  if (!spans.empty() && spans.back().data() + spans.back().size() == begin) {
    spans.back() = {spans.back().data(), spans.back().size() + bytes};
    return;
  }
  spans.emplace_back(begin, bytes);
}

Result<std::uint64_t> source_rows(const Plan& plan) {
  std::uint64_t rows = 0;
  for (const RowRun& run : plan.runs) {
    if (run.rows == 0 || run.count == 0) {
      return fail(Code::kInvalid, "plan has an empty run: rows={} count={}", run.rows, run.count);
    }
    if (run.count > 1 && run.dst_step < run.rows) {
      return fail(Code::kInvalid, "plan has overlapping pieces: dst_step={} rows={}", run.dst_step, run.rows);
    }
    std::uint64_t end = std::uint64_t{run.count - 1} * run.src_step + run.rows;
    if (__builtin_add_overflow(end, run.src_row, &end)) {
      return fail(Code::kInvalid, "plan run wraps around: src_row={} count={} src_step={}", run.src_row,
                  run.count, run.src_step);
    }
    rows = std::max(rows, end);
  }
  return rows;
}

}  // namespace

Result<void> check_job(const ChunkJob& job) {
  if (!job.plan || (!job.plan->runs.empty() && !job.source)) {
    return fail(Code::kInvalid, "chunk of room {} has no plan or no source pool", job.key.grant.room);
  }
  for (const AuxWrite& aux : job.aux) {
    if (aux.bytes.empty() || !std::in_range<std::uint32_t>(aux.bytes.size())) {
      return fail(Code::kInvalid, "aux field {} of room {} has {} bytes", aux.dst_field, job.key.grant.room,
                  aux.bytes.size());
    }
  }
  const Plan& plan = *job.plan;
  KVF_TRY(const std::uint64_t rows, source_rows(plan));
  for (const BufferPair& pair : plan.pairs) {
    if (plan.runs.empty()) {
      break;
    }
    if (pair.src_buffer >= job.source->buffer_count()) {
      return fail(Code::kInvalid, "plan names source buffer {}, but the pool has {}", pair.src_buffer,
                  job.source->buffer_count());
    }
    const std::uint32_t row_bytes = job.source->layout().buffers[pair.src_buffer].shape.row_bytes;
    if (pair.src_row_bytes != row_bytes || pair.bytes == 0 ||
        std::uint64_t{pair.src_offset} + pair.bytes > row_bytes ||
        std::uint64_t{pair.dst_offset} + pair.bytes > pair.dst_row_bytes) {
      return fail(Code::kInvalid,
                  "plan slices {} bytes at {} of {}-byte rows of source buffer {}, whose rows are {} bytes",
                  pair.bytes, pair.src_offset, pair.src_row_bytes, pair.src_buffer, row_bytes);
    }
    const std::uint64_t pool_rows = job.source->buffer(pair.src_buffer).size() / row_bytes;
    if (rows > pool_rows) {
      return fail(Code::kInvalid, "plan reads row {} of source buffer {}, which has {}", rows - 1,
                  pair.src_buffer, pool_rows);
    }
  }
  return {};
}

BlockCutter::BlockCutter(const ChunkJob& job, const CutLimits& limits) : job_(&job), limits_(limits) {
  KVF_CHECK(limits.spans_max > 0);
  if (job.plan->runs.empty()) {
    pair_ = job.plan->pairs.size();
  }
}

bool BlockCutter::done() const {
  return pair_ >= job_->plan->pairs.size() && aux_ >= job_->aux.size();
}

bool BlockCutter::next(CutBlock& block) {
  block.spans.clear();
  block.header = BlockHeader{};
  block.header.key = job_->key;
  if (pair_ < job_->plan->pairs.size()) {
    next_rows(block);
  } else if (aux_ < job_->aux.size()) {
    next_aux(block);
  } else {
    return false;
  }
  bytes_ += block.header.payload_bytes;
  ++blocks_;
  return true;
}

bool BlockCutter::next_rows(CutBlock& block) {
  const std::size_t pair_index = pair_;
  const BufferPair& pair = job_->plan->pairs[pair_index];
  const std::byte* base = job_->source->buffer(pair.src_buffer).data() + pair.src_offset;
  const bool whole_rows = pair.bytes == pair.src_row_bytes;
  BlockHeader& header = block.header;
  header.type = BlockType::kRows;
  header.target = pair.dst_buffer;
  header.row_offset = pair.dst_offset;
  header.row_bytes = pair.bytes;
  std::uint64_t rows_left = std::max<std::uint64_t>(1, limits_.payload_bytes_max / pair.bytes);
  while (pair_ == pair_index && rows_left > 0 && block.spans.size() < limits_.spans_max) {
    const RowRun& run = job_->plan->runs[run_];
    std::uint64_t rows = std::min<std::uint64_t>(run.rows - row_, rows_left);
    if (!whole_rows) {
      rows = std::min<std::uint64_t>(rows, limits_.spans_max - block.spans.size());
    }
    const auto taken = static_cast<std::uint32_t>(rows);
    const std::uint64_t dst_index = run.dst_index + std::uint64_t{piece_} * run.dst_step + row_;
    if (!extend(header, dst_index, taken)) {
      break;
    }
    const std::uint64_t src_row = run.src_row + std::uint64_t{piece_} * run.src_step + row_;
    const std::byte* from = base + src_row * pair.src_row_bytes;
    if (whole_rows) {
      append(block.spans, from, rows * pair.bytes);
    } else {
      for (std::uint64_t i = 0; i < rows; ++i) {
        append(block.spans, from + i * pair.src_row_bytes, pair.bytes);
      }
    }
    rows_left -= rows;
    advance(taken);
  }
  header.payload_bytes = std::uint64_t{header.rows} * header.count * header.row_bytes;
  return true;
}

/// Adds `rows` rows at `dst_index` to the block's shape (equal pieces at equal steps), if they continue it.
bool BlockCutter::extend(BlockHeader& header, std::uint64_t dst_index, std::uint32_t rows) const {
  if (header.count == 0) {
    header.dst_index = dst_index;
    header.rows = rows;
    header.count = 1;
    header.step = rows;
    return true;
  }
  constexpr std::uint64_t kMax = std::numeric_limits<std::uint32_t>::max();
  if (header.count == 1 && dst_index == header.dst_index + header.rows &&
      header.rows + std::uint64_t{rows} <= kMax) {
    header.rows += rows;
    header.step = header.rows;
    return true;
  }
  if (rows != header.rows || dst_index <= header.dst_index) {
    return false;
  }
  const std::uint64_t distance = dst_index - header.dst_index;
  if (header.count == 1 && distance >= rows && distance <= kMax) {
    header.step = static_cast<std::uint32_t>(distance);
    header.count = 2;
    return true;
  }
  if (header.count > 1 && distance == std::uint64_t{header.count} * header.step) {
    ++header.count;
    return true;
  }
  return false;
}

void BlockCutter::advance(std::uint32_t rows) {
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
}

void BlockCutter::next_aux(CutBlock& block) {
  const AuxWrite& aux = job_->aux[aux_++];
  BlockHeader& header = block.header;
  header.type = BlockType::kAux;
  header.target = aux.dst_field;
  header.dst_index = job_->aux_slot;
  header.rows = 1;
  header.count = 1;
  header.step = 1;
  header.row_bytes = static_cast<std::uint32_t>(aux.bytes.size());
  header.payload_bytes = aux.bytes.size();
  append(block.spans, aux.bytes.data(), aux.bytes.size());
}

}  // namespace kvferry
