#include "transport/shm/copy_work.h"

#include <algorithm>

#include "kernels/copy.h"

namespace kvferry::shm {
namespace {

/// One past the last row that any run writes, 0 without runs; nothing where it does not fit 64 bits.
bool destination_rows(const Plan& plan, std::uint64_t& rows) {
  rows = 0;
  for (const RowRun& run : plan.runs) {
    if (run.rows == 0 || run.count == 0) {
      return false;
    }
    std::uint64_t end = std::uint64_t{run.count - 1} * run.dst_step + run.rows;
    if (__builtin_add_overflow(end, run.dst_row, &end)) {
      return false;
    }
    rows = std::max(rows, end);
  }
  return true;
}

Result<void> check_pair(const BufferPair& pair, std::uint64_t rows, const Pool& destination) {
  const PoolLayout& layout = destination.layout();
  if (pair.dst_buffer >= layout.buffers.size()) {
    return fail(Code::kMismatch, "plan writes buffer {} of decode rank {}, whose pool has {}",
                pair.dst_buffer, layout.rank, layout.buffers.size());
  }
  const BufferShape& shape = layout.buffers[pair.dst_buffer].shape;
  if (pair.bytes == 0 || pair.dst_row_bytes != shape.row_bytes ||
      std::uint64_t{pair.dst_offset} + pair.bytes > shape.row_bytes) {
    return fail(
        Code::kMismatch,
        "plan writes {} bytes at {} of {}-byte rows into buffer {} of decode rank {}, whose rows have {} "
        "bytes",
        pair.bytes, pair.dst_offset, pair.dst_row_bytes, pair.dst_buffer, layout.rank, shape.row_bytes);
  }
  const std::uint64_t row_limit = destination.buffer(pair.dst_buffer).size() / shape.row_bytes;
  if (rows > row_limit) {
    return fail(
        Code::kInvalid,
        "pages beyond the pool of decode rank {}: {} pages needed, limit {} (buffer {}); grant pages below "
        "the limit",
        layout.rank, (rows - 1) / shape.pitch_of(layout.page_size) + 1, shape.pages, pair.dst_buffer);
  }
  return {};
}

}  // namespace

Result<std::shared_ptr<CopyWork>> CopyWork::make(std::shared_ptr<const Plan> plan,
                                                 std::shared_ptr<const Pool> source,
                                                 std::shared_ptr<const Pool> destination,
                                                 std::uint64_t slice_bytes) {
  std::uint64_t rows_end = 0;
  if (!destination_rows(*plan, rows_end)) {
    return fail(Code::kInvalid, "plan has a run that is empty or wraps around");
  }
  std::shared_ptr<CopyWork> work(new CopyWork());
  std::uint64_t rows = 0;
  for (const RowRun& run : plan->runs) {
    work->run_starts_.push_back(rows);
    if (__builtin_add_overflow(rows, std::uint64_t{run.rows} * run.count, &rows)) {
      return fail(Code::kInvalid, "plan has more rows than fit 64 bits");
    }
    work->blocks_ += run.src_step == run.rows && run.dst_step == run.rows ? 1 : run.count;
  }
  work->run_starts_.push_back(rows);
  std::uint32_t pair_bytes_max = 1;
  for (const BufferPair& pair : plan->pairs) {
    KVF_TRY_VOID(rows == 0 ? Result<void>{} : check_pair(pair, rows_end, *destination));
    pair_bytes_max = std::max(pair_bytes_max, pair.bytes);
    std::uint64_t bytes = 0;
    if (__builtin_mul_overflow(rows, pair.bytes, &bytes) ||
        __builtin_add_overflow(work->bytes_, bytes, &work->bytes_)) {
      return fail(Code::kInvalid, "plan has more bytes than fit 64 bits");
    }
  }
  work->blocks_ *= plan->pairs.size();
  work->rows_per_slice_ = std::max<std::uint64_t>(1, slice_bytes / pair_bytes_max);
  if (rows > 0 && !plan->pairs.empty()) {
    if (rows > work->rows_per_slice_) {
      work->slices_per_pair_ = (rows - 1) / work->rows_per_slice_ + 1;
    } else {
      work->pairs_per_slice_ = work->rows_per_slice_ / rows;
    }
    work->slices_ = ((plan->pairs.size() - 1) / work->pairs_per_slice_ + 1) * work->slices_per_pair_;
  }
  work->plan_ = std::move(plan);
  work->source_ = std::move(source);
  work->destination_ = std::move(destination);
  return work;
}

void CopyWork::copy(std::uint64_t index) const {
  const std::uint64_t first_pair = index / slices_per_pair_ * pairs_per_slice_;
  const std::uint64_t end_pair = std::min<std::uint64_t>(first_pair + pairs_per_slice_, plan_->pairs.size());
  const std::uint64_t first_row = index % slices_per_pair_ * rows_per_slice_;
  const std::uint64_t end_row = std::min(first_row + rows_per_slice_, run_starts_.back());
  for (std::uint64_t pair = first_pair; pair < end_pair; ++pair) {
    copy_rows(plan_->pairs[pair], first_row, end_row);
  }
  copy_fence();
}

void CopyWork::copy_rows(const BufferPair& pair, std::uint64_t first, std::uint64_t end) const {
  const std::byte* src = source_->buffer(pair.src_buffer).data() + pair.src_offset;
  std::byte* dst = destination_->buffer(pair.dst_buffer).data() + pair.dst_offset;
  const std::uint64_t src_row_bytes = pair.src_row_bytes;
  const std::uint64_t dst_row_bytes = pair.dst_row_bytes;
  const bool whole_rows = pair.bytes == src_row_bytes && pair.bytes == dst_row_bytes;
  // Rows [from, from + rows) of one piece.
  const auto copy_piece = [&](const RowRun& run, std::uint64_t piece, std::uint64_t from,
                              std::uint64_t rows) {
    copy_run(dst + (run.dst_row + piece * run.dst_step + from) * dst_row_bytes,
             src + (run.src_row + piece * run.src_step + from) * src_row_bytes, pair.bytes, rows,
             dst_row_bytes, src_row_bytes);
  };
  auto next = std::upper_bound(run_starts_.begin(), run_starts_.end(), first) - 1;
  for (std::uint64_t row = first; row < end; ++next) {
    const RowRun& run = plan_->runs[static_cast<std::size_t>(next - run_starts_.begin())];
    const std::uint64_t run_end = std::min(*(next + 1), end);
    while (row < run_end) {
      const std::uint64_t piece = (row - *next) / run.rows;
      const std::uint64_t from = (row - *next) % run.rows;
      const std::uint64_t whole = from == 0 ? (run_end - row) / run.rows : 0;
      if (whole > 0 && (whole_rows || run.rows == 1)) {
        // Many equal pieces in one call: contiguous pieces of whole rows, or slices of single rows.
        copy_run(dst + (run.dst_row + piece * run.dst_step) * dst_row_bytes,
                 src + (run.src_row + piece * run.src_step) * src_row_bytes,
                 run.rows * std::size_t{pair.bytes}, whole, run.dst_step * dst_row_bytes,
                 run.src_step * src_row_bytes);
        row += whole * run.rows;
        continue;
      }
      const std::uint64_t rows = std::min<std::uint64_t>(run.rows - from, run_end - row);
      copy_piece(run, piece, from, rows);
      row += rows;
    }
  }
}

}  // namespace kvferry::shm
