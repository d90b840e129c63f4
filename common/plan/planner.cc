// Runs of one chunk. A page covers page_size * dcp consecutive tokens of the request, so the chunk is walked
// in spans: stretches of tokens over which the pages of both sides are physically consecutive, and each
// side's row is therefore base + local row. Within a span every piece of the token pattern is one run,
// whatever its count.

#include <algorithm>
#include <limits>

#include "common/plan/plan.h"
#include "common/plan/token_pattern.h"

namespace kvferry {
namespace {

constexpr std::uint64_t kTokenMax = std::uint64_t{1} << 48;
constexpr std::uint64_t kBytesMax = (std::uint64_t{1} << 63) - 1;
constexpr std::uint64_t kRunMax = std::numeric_limits<std::uint32_t>::max();

constexpr std::size_t kReservedRunsMax = 1u << 14;

/// One side of the walk: its pages and the token at which the current page ends.
class PageCursor {
 public:
  PageCursor(std::span<const std::uint32_t> pages, std::uint32_t page_size, std::uint32_t pitch,
             std::uint64_t page_tokens, std::uint64_t first_token)
      : pages_(pages),
        page_size_(page_size),
        pitch_(pitch),
        page_tokens_(page_tokens),
        first_token_(first_token) {}

  std::size_t page_of(std::uint64_t token) const {
    return static_cast<std::size_t>((token - first_token_) / page_tokens_);
  }
  void seek(std::uint64_t token) {
    index_ = page_of(token);
    edge_ = first_token_ + (index_ + 1) * page_tokens_;
    highest_ = pages_[index_];
  }
  std::uint64_t edge() const { return edge_; }
  /// Moves to the next page; false when it is not the physical neighbour.
  bool advance() {
    const std::uint64_t before = pages_[index_];
    const std::uint64_t now = pages_[++index_];
    edge_ += page_tokens_;
    highest_ = std::max(highest_, now);
    return now == before + 1 && pitch_ == page_size_;
  }
  /// base() + local row is the physical row on the current page. Wraps below zero on purpose: the sum does
  /// not.
  std::uint64_t base() const { return pages_[index_] * pitch_ - index_ * page_size_; }
  /// The highest page that was current so far.
  std::uint64_t highest() const { return highest_; }

 private:
  std::span<const std::uint32_t> pages_;
  std::uint64_t page_size_;
  std::uint64_t pitch_;
  std::uint64_t page_tokens_;
  std::uint64_t first_token_;
  std::size_t index_ = 0;
  std::uint64_t edge_ = 0;
  std::uint64_t highest_ = 0;
};

struct RowSteps {
  std::uint64_t period = 0;  // tokens
  std::uint64_t src = 0;     // rows per period
  std::uint64_t dst = 0;
};

/// Where the rows of a span lie.
struct Bases {
  std::uint64_t src = 0;
  std::uint64_t dst = 0;
};

/// Walks one piece of the pattern through the chunk and writes its runs.
class PieceCursor {
 public:
  PieceCursor(std::uint64_t length, const RowSteps& steps) : length_(length), steps_(steps) {}

  /// Starts at `token`, with `left` tokens of the current piece still to come.
  void start(std::uint64_t token, std::uint64_t left, std::uint64_t src_local, std::uint64_t dst_local) {
    token_ = token;
    left_ = left;
    src_local_ = src_local;
    dst_local_ = dst_local;
  }

  /// Emits everything before token `end`.
  void emit(std::uint64_t end, const Bases& bases, std::vector<RowRun>& runs) {
    if (token_ >= end) {
      return;
    }
    // Spans of one page repeat: one run of the same shape as the last, and nothing left over.
    if (end - token_ == usual_.stretch && left_ == length_) {
      const RowRun& shape = usual_.shape;
      runs.push_back({bases.src + src_local_, bases.dst + dst_local_, dst_local_, shape.rows, shape.count,
                      shape.src_step, shape.dst_step});
      token_ += usual_.steps.period;
      src_local_ += usual_.steps.src;
      dst_local_ += usual_.steps.dst;
      rows_ += usual_.rows;
      return;
    }
    emit_any(end, bases, runs);
  }

  /// The same without the short cut.
  // Out of line: rare, and it would crowd the loop over spans.
  [[gnu::noinline]] void emit_any(std::uint64_t end, const Bases& bases, std::vector<RowRun>& runs) {
    if (token_ >= end) {
      return;
    }
    if (left_ != length_ && !emit_rest(end, bases, runs)) {
      return;
    }
    if (length_ <= kRunMax && token_ + length_ <= end) {
      const std::uint64_t stretch = end - token_;
      const std::size_t runs_before = runs.size();
      emit_whole((stretch - length_) / steps_.period + 1, bases, runs);
      if (token_ >= end && runs.size() == runs_before + 1) {
        const RowRun& run = runs.back();
        usual_ = {stretch,
                  run,
                  {run.count * steps_.period, run.count * steps_.src, run.count * steps_.dst},
                  run.count * length_};
      }
    }
    if (token_ < end) {
      emit_rest(end, bases, runs);
    }
  }

  /// Rows emitted so far.
  std::uint64_t rows() const { return rows_; }

 private:
  /// A stretch of tokens that is exactly one run, and how far that run carries the cursor.
  struct Usual {
    std::uint64_t stretch = 0;
    RowRun shape;
    RowSteps steps;
    std::uint64_t rows = 0;
  };

  void advance(std::uint64_t pieces) {
    token_ += pieces * steps_.period;
    src_local_ += pieces * steps_.src;
    dst_local_ += pieces * steps_.dst;
    rows_ += pieces * length_;
  }

  void push(std::uint64_t rows, std::uint64_t count, std::uint64_t src_step, std::uint64_t dst_step,
            const Bases& bases, std::vector<RowRun>& runs) const {
    runs.push_back({bases.src + src_local_, bases.dst + dst_local_, dst_local_,
                    static_cast<std::uint32_t>(rows), static_cast<std::uint32_t>(count),
                    static_cast<std::uint32_t>(src_step), static_cast<std::uint32_t>(dst_step)});
  }

  void emit_whole(std::uint64_t pieces, const Bases& bases, std::vector<RowRun>& runs) {
    const bool steps_fit = steps_.src <= kRunMax && steps_.dst <= kRunMax;
    while (pieces > 0) {
      const std::uint64_t count = steps_fit ? std::min(pieces, kRunMax) : 1;
      push(length_, count, count == 1 ? length_ : steps_.src, count == 1 ? length_ : steps_.dst, bases, runs);
      advance(count);
      pieces -= count;
    }
  }

  /// Emits the current piece up to `end`; true when that finished the piece.
  bool emit_rest(std::uint64_t end, const Bases& bases, std::vector<RowRun>& runs) {
    std::uint64_t rows = std::min(left_, end - token_);
    while (rows > 0) {
      const std::uint64_t part = std::min(rows, kRunMax);
      push(part, 1, part, part, bases, runs);
      token_ += part;
      src_local_ += part;
      dst_local_ += part;
      rows_ += part;
      left_ -= part;
      rows -= part;
    }
    if (left_ > 0) {
      return false;
    }
    token_ += steps_.period - length_;
    src_local_ += steps_.src - length_;
    dst_local_ += steps_.dst - length_;
    left_ = length_;
    return true;
  }

  std::uint64_t length_;
  RowSteps steps_;
  std::uint64_t token_ = 0;
  std::uint64_t left_ = 0;
  std::uint64_t src_local_ = 0;
  std::uint64_t dst_local_ = 0;
  std::uint64_t rows_ = 0;
  Usual usual_;
};

/// The chunk after ownership has been resolved: in tokens, or in local rows where both sides own the same
/// tokens (then nothing is strided and both classes are 1 of 1).
struct Walk {
  TokenClass src_tokens;
  TokenClass dst_tokens;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::uint64_t src_first = 0;
  std::uint64_t dst_first = 0;
};

Walk resolve(const PairLayout& layout, const ChunkRequest& chunk) {
  if (!layout.src_tokens.same_tokens(layout.dst_tokens)) {
    return {layout.src_tokens, layout.dst_tokens,     chunk.begin,
            chunk.end,         chunk.src_first_token, chunk.dst_first_token};
  }
  const TokenClass& own = layout.src_tokens;
  return {{},
          {},
          own.owned_before(chunk.begin),
          own.owned_before(chunk.end),
          own.owned_before(chunk.src_first_token),
          own.owned_before(chunk.dst_first_token)};
}

/// The pieces that occur in the walk, their first positions, and the first and last shared token.
struct Shared {
  std::vector<PieceCursor> cursors;
  std::uint64_t first = std::numeric_limits<std::uint64_t>::max();
  std::uint64_t last = 0;
};

Shared shared_tokens(const Walk& walk) {
  if (walk.begin == walk.end) {
    return {};
  }
  TokenPattern pattern;
  if (walk.src_tokens.count == 1 && walk.dst_tokens.count == 1) {
    pattern = {walk.end - walk.begin, {{walk.begin, walk.end - walk.begin}}};
  } else {
    pattern = token_pattern(walk.src_tokens, walk.dst_tokens);
  }
  const RowSteps steps{pattern.period, pattern.period / walk.src_tokens.count,
                       pattern.period / walk.dst_tokens.count};
  const std::uint64_t src_origin = walk.src_tokens.owned_before(walk.src_first);
  const std::uint64_t dst_origin = walk.dst_tokens.owned_before(walk.dst_first);
  Shared shared;
  for (const TokenPattern::Piece& piece : pattern.pieces) {
    std::uint64_t token = piece.begin;
    std::uint64_t left = piece.length;
    if (walk.begin > piece.begin) {
      const std::uint64_t inside = (walk.begin - piece.begin) % pattern.period;
      left = inside < piece.length ? piece.length - inside : piece.length;
      token = inside < piece.length ? walk.begin : walk.begin + (pattern.period - inside);
    }
    if (token >= walk.end) {
      continue;
    }
    const std::uint64_t inside_last = (walk.end - 1 - piece.begin) % pattern.period;
    const std::uint64_t last =
        walk.end - 1 - (inside_last < piece.length ? 0 : inside_last - (piece.length - 1));
    PieceCursor cursor(piece.length, steps);
    cursor.start(token, left, walk.src_tokens.owned_before(token) - src_origin,
                 walk.dst_tokens.owned_before(token) - dst_origin);
    shared.cursors.push_back(cursor);
    shared.first = std::min(shared.first, token);
    shared.last = std::max(shared.last, last);
  }
  return shared;
}

Result<void> check_chunk(const PairLayout& layout, const ChunkRequest& chunk) {
  if (chunk.begin > chunk.end || chunk.end > kTokenMax) {
    return fail(Code::kInvalid, "chunk tokens [{}, {}) are not a range below 2^48", chunk.begin, chunk.end);
  }
  const auto aligned = [&chunk](std::string_view field, std::uint64_t first, std::uint32_t page_size,
                                const TokenClass& tokens) -> Result<void> {
    const std::uint64_t page_tokens = std::uint64_t{page_size} * tokens.count;
    if (page_tokens == 0 || first % page_tokens != 0 || first > chunk.begin) {
      return fail(
          Code::kInvalid,
          "{} {} must align to the virtual page of {} tokens (page_size {} * dcp {}) and be at most the "
          "chunk's first token {}",
          field, first, page_tokens, page_size, tokens.count, chunk.begin);
    }
    return {};
  };
  const bool splits = layout.src_cp.count > 1 && layout.src_cp.split != CpSplit::kNone;
  if (splits && (chunk.begin < chunk.request.begin || chunk.end > chunk.request.end)) {
    return fail(Code::kInvalid,
                "chunk tokens [{}, {}) are not within the request's [{}, {}), which the CP ranks "
                "divide",
                chunk.begin, chunk.end, chunk.request.begin, chunk.request.end);
  }
  KVF_TRY_VOID(aligned("src_first_token", chunk.src_first_token, layout.src_page_size, layout.src_tokens));
  return aligned("dst_first_token", chunk.dst_first_token, layout.dst_page_size, layout.dst_tokens);
}

Result<void> check_page_counts(const PairLayout& layout, const ChunkRequest& chunk, std::size_t src_needed,
                               std::size_t dst_needed) {
  if (src_needed > chunk.src_pages.size()) {
    return fail(
        Code::kInvalid,
        "tokens [{}, {}) must fit in the provided source pages: needed {}, given {} (page_size {}, DCP rank "
        "{} of {}, src_first_token {}); pass the pages and the token range of the same chunk",
        chunk.begin, chunk.end, src_needed, chunk.src_pages.size(), layout.src_page_size,
        layout.src_tokens.rank, layout.src_tokens.count, chunk.src_first_token);
  }
  if (dst_needed > chunk.dst_pages.size()) {
    return fail(
        Code::kInvalid,
        "Insufficient destination pages for tokens [{}, {}): needed {}, given {} (page_size {}, DCP rank {} "
        "of {}, dst_first_token {}); pass the whole request's page list, never a slice, and grant one page "
        "per {} tokens",
        chunk.begin, chunk.end, dst_needed, chunk.dst_pages.size(), layout.dst_page_size,
        layout.dst_tokens.rank, layout.dst_tokens.count, chunk.dst_first_token,
        std::uint64_t{layout.dst_page_size} * layout.dst_tokens.count);
  }
  return {};
}

/// The pool limits, judged by the rows that move: pages that no token of the chunk needs may be anything.
Result<void> check_limits(const PairLayout& layout, const Plan& plan) {
  std::uint64_t src_last = 0;
  std::uint64_t dst_last = 0;
  for (const RowRun& run : plan.runs) {
    const std::uint64_t more = run.count - 1;
    src_last = std::max(src_last, run.src_row + more * run.src_step + run.rows - 1);
    dst_last = std::max(dst_last, run.dst_row + more * run.dst_step + run.rows - 1);
  }
  const auto inside = [](std::string_view side, std::uint64_t page, std::uint64_t pages) -> Result<void> {
    if (page >= pages) {
      return fail(Code::kInvalid, "{} page {} is outside the pool of {} pages", side, page, pages);
    }
    return {};
  };
  KVF_TRY_VOID(inside("source", src_last / layout.src_pitch, layout.src_pages));
  return inside("destination", dst_last / layout.dst_pitch, layout.dst_pages);
}

Result<void> total(const PairLayout& layout, Plan& plan) {
  std::uint64_t row_bytes = 0;
  for (const BufferPair& pair : layout.pairs) {
    row_bytes += pair.bytes;
  }
  if (row_bytes > 0 && plan.rows > kBytesMax / row_bytes) {
    return fail(Code::kInvalid, "{} rows of {} bytes over all layers are beyond 2^63 bytes", plan.rows,
                row_bytes);
  }
  plan.bytes = plan.rows * row_bytes;
  plan.pairs = layout.pairs;
  return {};
}

/// Writes all runs of tokens before `stop`; true when every page on the way is inside the pool. The page
/// cursors are copies, so that the compiler may keep them in registers.
bool walk_spans(const PairLayout& layout, PageCursor src, PageCursor dst, std::uint64_t stop,
                std::vector<PieceCursor>& cursors, std::vector<RowRun>& runs) {
  Bases bases{src.base(), dst.base()};
  while (true) {
    const std::uint64_t end = std::min(src.edge(), dst.edge());
    if (end >= stop) {
      break;
    }
    // Both sides may end a page here, and both must move before the span is judged.
    bool consecutive = true;
    if (src.edge() == end) {
      consecutive = src.advance();
    }
    if (dst.edge() == end) {
      consecutive = dst.advance() && consecutive;
    }
    if (!consecutive) {
      for (PieceCursor& cursor : cursors) {
        cursor.emit(end, bases, runs);
      }
      bases = {src.base(), dst.base()};
    }
  }
  for (PieceCursor& cursor : cursors) {
    cursor.emit_any(stop, bases, runs);
  }
  return src.highest() < layout.src_pages && dst.highest() < layout.dst_pages;
}

/// Appends the runs of the chunk's tokens to the plan.
Result<void> plan_tokens(const PairLayout& layout, const ChunkRequest& chunk, Plan& plan) {
  const Walk walk = resolve(layout, chunk);
  Shared shared = shared_tokens(walk);
  if (shared.cursors.empty()) {
    return {};
  }
  PageCursor src(chunk.src_pages, layout.src_page_size, layout.src_pitch,
                 std::uint64_t{layout.src_page_size} * walk.src_tokens.count, walk.src_first);
  PageCursor dst(chunk.dst_pages, layout.dst_page_size, layout.dst_pitch,
                 std::uint64_t{layout.dst_page_size} * walk.dst_tokens.count, walk.dst_first);
  const std::size_t src_last = src.page_of(shared.last);
  const std::size_t dst_last = dst.page_of(shared.last);
  KVF_TRY_VOID(check_page_counts(layout, chunk, src_last + 1, dst_last + 1));

  src.seek(shared.first);
  dst.seek(shared.first);
  // Scattered pages need about one run per page; where they were consecutive, the room is given back.
  const std::size_t pages = src_last - src.page_of(shared.first) + dst_last - dst.page_of(shared.first) + 1;
  plan.runs.reserve(plan.runs.size() + std::min(pages, kReservedRunsMax) * shared.cursors.size());
  if (!walk_spans(layout, src, dst, shared.last + 1, shared.cursors, plan.runs)) {
    KVF_TRY_VOID(check_limits(layout, plan));
  }
  for (const PieceCursor& cursor : shared.cursors) {
    plan.rows += cursor.rows();
  }
  return {};
}

/// What this source sends of the chunk: all of it, or the CP rank's share.
std::vector<ChunkRequest> shares(const PairLayout& layout, const ChunkRequest& chunk) {
  if (layout.src_cp.count == 1 || layout.src_cp.split == CpSplit::kNone) {
    return {chunk};
  }
  std::vector<ChunkRequest> out;
  const std::uint64_t page_tokens = std::uint64_t{layout.src_page_size} * layout.src_tokens.count;
  for (const Interval& share : cp_share(layout.src_cp, page_tokens, chunk.request)) {
    const Interval tokens = intersect(share, {chunk.begin, chunk.end});
    if (tokens.size() > 0) {
      out.push_back(chunk);
      out.back().begin = tokens.begin;
      out.back().end = tokens.end;
    }
  }
  return out;
}

}  // namespace

Result<Plan> plan_chunk(const PairLayout& layout, const ChunkRequest& chunk) {
  KVF_TRY_VOID(check_chunk(layout, chunk));
  Plan plan;
  if (layout.pairs.empty() || chunk.begin == chunk.end) {
    return plan;
  }
  for (const ChunkRequest& share : shares(layout, chunk)) {
    KVF_TRY_VOID(plan_tokens(layout, share, plan));
  }
  if (plan.runs.empty()) {
    return plan;
  }
  if (plan.runs.size() < plan.runs.capacity() / 2) {
    plan.runs.shrink_to_fit();
  }
  KVF_TRY_VOID(total(layout, plan));
  return plan;
}

}  // namespace kvferry
