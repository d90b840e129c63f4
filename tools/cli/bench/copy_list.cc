#include "tools/cli/bench/copy_list.h"

#include <algorithm>
#include <cstring>

#include "kernels/copy.h"
#include "tools/cli/bench/parallel.h"

namespace kvferry {
namespace {

RankShape shape_of(const Topology& topology, const BenchRank& rank) {
  return {topology, rank.coord, rank.rows.page_size(), rank.rows.buffers()};
}

RequestRows rows_of(std::span<const std::uint32_t> pages) {
  return {.pages = pages, .first_token = 0, .window_pages = {}, .window_first = 0, .state_slot = {}};
}

}  // namespace

void append_copies(const Plan& plan, const RankMemory& src, const RankMemory& dst,
                   std::vector<StridedCopy>& copies) {
  for (const BufferPair& pair : plan.pairs) {
    const std::size_t src_row = pair.src_row_bytes;
    const std::size_t dst_row = pair.dst_row_bytes;
    const std::byte* from = src.buffer(pair.src_buffer).data() + pair.src_offset;
    std::byte* to = dst.buffer(pair.dst_buffer).data() + pair.dst_offset;
    const bool whole_rows = pair.bytes == src_row && pair.bytes == dst_row;
    for (const RowRun& run : plan.runs) {
      std::byte* const run_dst = to + run.dst_row * dst_row;
      const std::byte* const run_src = from + run.src_row * src_row;
      const bool contiguous = run.src_step == run.rows && run.dst_step == run.rows;
      if (whole_rows && contiguous) {
        const std::size_t bytes = std::size_t{run.rows} * run.count * pair.bytes;
        copies.push_back({run_dst, run_src, bytes, 1, bytes, bytes});
      } else if (whole_rows || run.rows == 1) {
        copies.push_back({run_dst, run_src, std::size_t{run.rows} * pair.bytes, run.count,
                          run.dst_step * dst_row, run.src_step * src_row});
      } else if (contiguous) {
        copies.push_back({run_dst, run_src, pair.bytes, std::size_t{run.rows} * run.count, dst_row, src_row});
      } else {
        for (std::size_t piece = 0; piece < run.count; ++piece) {
          copies.push_back({run_dst + piece * run.dst_step * dst_row,
                            run_src + piece * run.src_step * src_row, pair.bytes, run.rows, dst_row,
                            src_row});
        }
      }
    }
  }
}

Result<CopyList> CopyList::create(const DemoLayout& layout, const BenchSide& prefill, const BenchSide& decode,
                                  std::span<const BenchRoom> rooms) {
  struct Pair {
    const BenchRank& src;
    const BenchRank& dst;
    std::vector<PairLayout> layouts;
  };
  std::vector<Pair> pairs;
  for (const BenchRank& src : prefill.ranks()) {
    for (const BenchRank& dst : decode.ranks()) {
      KVF_TRY(auto layouts,
              pair_layouts(layout.model, shape_of(layout.prefill, src), shape_of(layout.decode, dst)));
      pairs.push_back({src, dst, std::move(layouts)});
    }
  }
  CopyList list;
  for (const BenchRoom& room : rooms) {
    std::uint64_t bytes = 0;
    for (const Pair& pair : pairs) {
      PartRequest part;
      part.tokens = part.request = {0, room.tokens};
      part.last = true;
      part.src = rows_of(prefill.pages(pair.src, room));
      part.dst = rows_of(decode.pages(pair.dst, room));
      for (const PairLayout& of_part : pair.layouts) {
        if (of_part.pairs.empty() || !of_part.elected(Room{room.slot} + 1)) {
          continue;
        }
        KVF_TRY(const Plan plan, plan_part(of_part, part));
        append_copies(plan, pair.src.memory, pair.dst.memory, list.copies_);
        bytes += plan.bytes;
      }
    }
    list.room_bytes_.push_back(bytes);
    list.bytes_ += bytes;
  }
  return list;
}

std::uint64_t CopyList::pieces() const {
  std::uint64_t pieces = 0;
  for (const StridedCopy& copy : copies_) {
    pieces += copy.count;
  }
  return pieces;
}

void CopyList::copy_with_memcpy() const {
  for (const StridedCopy& copy : copies_) {
    for (std::size_t i = 0; i < copy.count; ++i) {
      std::memcpy(copy.dst + i * copy.dst_stride, copy.src + i * copy.src_stride, copy.piece_bytes);
    }
  }
}

void CopyList::copy_with_kernel(unsigned threads) const {
  // So many copies at a time that a thread comes for more rarely, and yet all end together.
  const std::size_t share = std::max<std::size_t>(1, copies_.size() / (std::size_t{threads} * 16));
  for_each_index((copies_.size() + share - 1) / share, threads, [&](std::size_t i) {
    const auto mine = std::span(copies_).subspan(i * share, std::min(share, copies_.size() - i * share));
    for (const StridedCopy& copy : mine) {
      copy_run(copy.dst, copy.src, copy.piece_bytes, copy.count, copy.dst_stride, copy.src_stride);
    }
    copy_fence();
  });
}

}  // namespace kvferry
