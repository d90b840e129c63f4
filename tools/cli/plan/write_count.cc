#include "tools/cli/plan/write_count.h"

#include <algorithm>
#include <limits>
#include <map>

#include "common/base/check.h"
#include "transport/ucx/put_cutter.h"

namespace kvferry {
namespace {

constexpr std::uint64_t kStepMax = std::numeric_limits<std::uint32_t>::max();

/// Buffer pairs that are cut alike, as often as there are layers and kinds of them.
struct PairClass {
  std::uint64_t bytes = 0;    // per row
  bool whole_source = false;  // the slice is the whole source row
  bool by_puts = false;
  auto operator<=>(const PairClass&) const = default;
};

/// Rows that follow each other on both sides.
struct Stretch {
  std::uint64_t src = 0;
  std::uint64_t dst = 0;
  std::uint64_t rows = 0;
};

Stretch piece_of(const RowRun& run, std::uint64_t piece, std::uint64_t dst) {
  return {run.src_row + piece * run.src_step, dst + piece * run.dst_step, run.rows};
}

/// BlockCutter's blocks of one buffer pair.
class Blocks {
 public:
  Blocks(const PairClass& pair, const CutLimits& limits) : pair_(pair), limits_(limits) {
    KVF_CHECK(limits.spans_max > 0);
  }

  std::uint64_t count(const Plan& plan) {
    for (const RowRun& run : plan.runs) {
      for (std::uint64_t piece = 0; piece < run.count;) {
        add(piece_of(run, piece, run.dst_index));
        ++piece;
        piece += skip(run, piece);
      }
    }
    close();
    return blocks_;
  }

 private:
  void close() {
    blocks_ += open_ ? 1 : 0;
    open_ = false;
  }

  void add(Stretch rest) {
    while (rest.rows > 0) {
      if (!open_) {
        open_ = true;
        pieces_ = 0;
        spans_ = 0;
        rows_left_ = std::max<std::uint64_t>(1, limits_.payload_bytes_max / pair_.bytes);
      }
      std::uint64_t rows = std::min(rest.rows, rows_left_);
      if (!pair_.whole_source) {
        rows = std::min<std::uint64_t>(rows, limits_.spans_max - spans_);
      }
      if (!extend(rest.dst, rows)) {
        close();
        continue;
      }
      const bool joins = spans_ > 0 && rest.src == src_end_;
      spans_ += !pair_.whole_source ? rows : joins ? 0 : 1;
      src_end_ = rest.src + rows;
      rows_left_ -= rows;
      rest = {rest.src + rows, rest.dst + rows, rest.rows - rows};
      close_when_full();
    }
  }

  void close_when_full() {
    if (rows_left_ == 0 || spans_ >= limits_.spans_max) {
      close();
    }
  }

  /// Adds rows to the block's shape (equal pieces at equal steps), if they continue it.
  bool extend(std::uint64_t dst, std::uint64_t rows) {
    if (pieces_ == 0) {
      first_ = dst;
      rows_ = rows;
      pieces_ = 1;
      step_ = rows;
      return true;
    }
    if (pieces_ == 1 && dst == first_ + rows_ && rows_ + rows <= kStepMax) {
      rows_ += rows;
      step_ = rows_;
      return true;
    }
    if (rows != rows_ || dst <= first_) {
      return false;
    }
    const std::uint64_t distance = dst - first_;
    if (pieces_ == 1 && distance >= rows && distance <= kStepMax) {
      step_ = distance;
      pieces_ = 2;
      return true;
    }
    if (pieces_ > 1 && distance == pieces_ * step_) {
      ++pieces_;
      return true;
    }
    return false;
  }

  /// Takes whole pieces of `run` from `piece` on that only make the open block larger; how many.
  std::uint64_t skip(const RowRun& run, std::uint64_t piece) {
    if (!open_ || piece >= run.count) {
      return 0;
    }
    const Stretch next = piece_of(run, piece, run.dst_index);
    const bool longer = pieces_ == 1 && run.dst_step == run.rows && next.dst == first_ + rows_;
    const bool more =
        pieces_ > 1 && rows_ == run.rows && step_ == run.dst_step && next.dst == first_ + pieces_ * step_;
    if (!longer && !more) {
      return 0;
    }
    const std::uint64_t spans_each = !pair_.whole_source ? run.rows : run.src_step == run.rows ? 0 : 1;
    std::uint64_t pieces = std::min<std::uint64_t>(run.count - piece, rows_left_ / run.rows);
    if (spans_each > 0) {
      pieces = std::min(pieces, (limits_.spans_max - spans_) / spans_each);
    }
    if (longer) {
      pieces = std::min(pieces, (kStepMax - rows_) / run.rows);
      rows_ += pieces * run.rows;
      step_ = rows_;
    } else {
      pieces_ += pieces;
    }
    if (pieces > 0) {
      spans_ += pieces * spans_each;
      rows_left_ -= pieces * run.rows;
      src_end_ = piece_of(run, piece + pieces - 1, 0).src + run.rows;
      close_when_full();
    }
    return pieces;
  }

  PairClass pair_;
  CutLimits limits_;
  std::uint64_t blocks_ = 0;
  bool open_ = false;
  std::uint64_t first_ = 0;  // of the destination rows; the block has `pieces_` of `rows_` rows each
  std::uint64_t rows_ = 0;
  std::uint64_t pieces_ = 0;
  std::uint64_t step_ = 0;
  std::uint64_t spans_ = 0;
  std::uint64_t src_end_ = 0;
  std::uint64_t rows_left_ = 0;
};

/// PutCutter's segments of one buffer pair.
class Puts {
 public:
  Puts(const PairClass& pair, const ucx::PutLimits& limits) : pair_(pair), limits_(limits) {}

  void count(const Plan& plan, WriteCount& out) {
    for (const RowRun& run : plan.runs) {
      for (std::uint64_t piece = 0; piece < run.count;) {
        add(piece_of(run, piece, run.dst_row));
        ++piece;
        piece += skip(run, piece);
      }
    }
    close();
    out.puts += puts_;
    out.packed_bytes += packed_bytes_;
  }

 private:
  void close() {
    puts_ += bytes_ > 0 ? 1 : 0;
    packed_bytes_ += spans_ > 1 ? bytes_ : 0;
    bytes_ = 0;
    spans_ = 0;
  }

  void add(Stretch rest) {
    while (rest.rows > 0) {
      const std::uint64_t tried = pair_.whole_source ? rest.rows : 1;
      std::uint64_t room = std::max(limits_.put_bytes_max, pair_.bytes);
      bool joins = false;
      if (spans_ > 0) {
        joins = pair_.whole_source && rest.src == src_end_;
        const bool direct = joins && spans_ == 1;
        const bool large = spans_ == 1 && bytes_ >= ucx::kDirectBytesMin;
        if (rest.dst != dst_end_ ||
            (!direct && (large || (!joins && tried * pair_.bytes >= ucx::kDirectBytesMin)))) {
          close();
          continue;
        }
        const std::uint64_t limit = direct ? limits_.put_bytes_max : limits_.slot_bytes;
        room = limit > bytes_ ? limit - bytes_ : 0;
      }
      std::uint64_t rows = std::min(tried, room / pair_.bytes);
      if (rows == 0) {
        close();
        continue;
      }
      if (spans_ > 1 && !pair_.whole_source) {
        rows = std::min(rest.rows, room / pair_.bytes);  // packed row by row, until the slot is full
      }
      spans_ += !pair_.whole_source ? rows : joins ? 0 : 1;
      bytes_ += rows * pair_.bytes;
      src_end_ = rest.src + rows;
      dst_end_ = rest.dst + rows;
      rest = {rest.src + rows, rest.dst + rows, rest.rows - rows};
    }
  }

  /// Takes whole pieces of `run` from `piece` on whose end is certain: packed into the open slot, or each a
  /// put of its own; how many.
  std::uint64_t skip(const RowRun& run, std::uint64_t piece) {
    const std::uint64_t piece_bytes = run.rows * pair_.bytes;
    if (piece + 1 >= run.count || piece_bytes >= ucx::kDirectBytesMin || bytes_ == 0) {
      return 0;
    }
    std::uint64_t pieces = 0;
    if (run.dst_step == run.rows) {
      if (spans_ < 2 || (pair_.whole_source && run.src_step == run.rows)) {
        return 0;
      }
      const std::uint64_t room = limits_.slot_bytes > bytes_ ? limits_.slot_bytes - bytes_ : 0;
      pieces = std::min<std::uint64_t>(run.count - piece, room / piece_bytes);
      bytes_ += pieces * piece_bytes;
    } else {
      if (piece_bytes > std::min(limits_.put_bytes_max, limits_.slot_bytes)) {
        return 0;
      }
      // The last piece is left to add(): the next run may continue it.
      pieces = run.count - 1 - piece;
      close();
      puts_ += pieces;
      packed_bytes_ += pair_.whole_source || run.rows == 1 ? 0 : pieces * piece_bytes;
    }
    if (pieces > 0) {
      const Stretch last = piece_of(run, piece + pieces - 1, run.dst_row);
      src_end_ = last.src + run.rows;
      dst_end_ = last.dst + run.rows;
    }
    return pieces;
  }

  PairClass pair_;
  ucx::PutLimits limits_;
  std::uint64_t puts_ = 0;
  std::uint64_t packed_bytes_ = 0;
  std::uint64_t bytes_ = 0;  // of the open segment; 0 = none is open
  std::uint64_t spans_ = 0;
  std::uint64_t src_end_ = 0;
  std::uint64_t dst_end_ = 0;
};

}  // namespace

WriteCount count_writes(const Plan& plan, const WriteLimits& limits) {
  WriteCount out;
  if (plan.runs.empty()) {
    return out;
  }
  for (const RowRun& run : plan.runs) {
    out.copies += run.src_step == run.rows && run.dst_step == run.rows ? 1 : run.count;
  }
  out.copies *= plan.pairs.size();
  const ucx::PutChoice choice(plan);
  std::map<PairClass, std::uint64_t> classes;
  for (const BufferPair& pair : plan.pairs) {
    ++classes[{pair.bytes, pair.bytes == pair.src_row_bytes, choice.by_puts(pair)}];
  }
  for (const auto& [pair, buffers] : classes) {
    out.blocks += buffers * Blocks(pair, limits.blocks).count(plan);
    WriteCount one;
    if (pair.by_puts) {
      Puts(pair, limits.puts).count(plan, one);
    } else {
      one.puts = Blocks(pair, ucx::kPutModeBlocks).count(plan);
    }
    out.puts += buffers * one.puts;
    out.packed_bytes += buffers * one.packed_bytes;
  }
  return out;
}

}  // namespace kvferry
