#pragma once
// The planner's specification for hybrid models by brute force: which (layer, kind, head or element, token)
// each byte of a rank's pool is, counted one by one, over windows, recurrent state, draft layers and index
// rows. As oracle.h, it shares no arithmetic with common/topology and common/plan; only their plain structs.

#include <cstdint>
#include <string>
#include <vector>

#include "common/plan/plan.h"

namespace kvferry::oracle {

/// What names the rows of a buffer, by looking its layer up.
RowSpace space_of(const ModelGeometry& model, const BufferId& id);

/// The buffers of one rank: those of its stage, and the draft model's on the last one where it has them.
std::vector<BufferId> buffers_of(const ModelGeometry& model, const Topology& topology, const RankCoord& coord,
                                 bool with_draft);

/// Rows of one page of such a buffer: tokens of a virtual page that this rank has a row for.
std::uint32_t rows_in_page(RowSpace space, std::uint32_t page_size, const Topology& topology);

/// The tags of one row of such a buffer on tp rank `tp`, for token 0: one per byte, so their number is its
/// width. Heads and elements of sharded blocks are dealt out one by one.
std::vector<std::uint64_t> row_tags(const ModelGeometry& model, const Topology& topology, std::uint32_t tp,
                                    const BufferId& id);
/// The tag of the same byte for `token`. 0 is "nothing of this request".
std::uint64_t tag_at(std::uint64_t row_tag, std::uint64_t token);

/// pair_is_legal(), and both sides deal out every block of state in equal shares.
bool hybrid_pair_is_legal(const ModelGeometry& model, const Topology& prefill, std::uint32_t prefill_page,
                          const Topology& decode, std::uint32_t decode_page);

/// The tokens whose rows of a part move with the last chunk, or with a chunk of `part.tokens`.
Interval moving_tokens(RowSpace space, const PartRequest& part);
/// Whether every row that `src` has to send to `dst` of this part has a page, inside a pool of `src_pages`
/// and `dst_pages`, and page lists begin where they may.
bool part_is_legal(const RankShape& src, std::uint64_t src_pages, const RankShape& dst,
                   std::uint64_t dst_pages, RowSpace space, const PartRequest& part);

/// What of a request lies in a pool.
struct Content {
  Interval tokens;
  Interval window;
  bool draft = false;
};

/// A rank's pool with the rows of one request in it: a tag for every byte of every buffer, gaps included.
class Memory {
 public:
  /// All of it "nothing of this request".
  explicit Memory(const RankShape& shape);
  /// `rows` says where the tokens lie (from its first token on), `content` which of them do.
  Memory(const ModelGeometry& model, const RankShape& shape, const RequestRows& rows, const Content& content);

  const std::vector<std::vector<std::uint64_t>>& buffers() const { return buffers_; }

 private:
  void put(const RankShape& shape, std::size_t buffer, const std::vector<std::uint64_t>& tags,
           std::uint64_t row, std::uint64_t token);

  std::vector<std::vector<std::uint64_t>> buffers_;
};

/// A destination pool that records what is written.
class Ledger {
 public:
  explicit Ledger(const RankShape& shape);
  /// Executes `plan`, byte by byte. False, and a reason, on any access outside either pool, on a second write
  /// to a byte, and where the plan's own counts are wrong.
  bool apply(const Plan& plan, const RankShape& src_shape, const Memory& src, std::string& why);
  /// Every byte that `wanted` has a tag for was written with it, and no other byte was.
  bool matches(const Memory& wanted, std::string& why) const;

 private:
  bool apply_rows(const BufferPair& pair, std::uint64_t src_row, std::uint64_t dst_row, const Memory& src,
                  std::string& why);

  const RankShape& shape_;
  std::vector<std::vector<std::uint64_t>> tags_;
  std::vector<std::vector<std::uint8_t>> written_;
};

}  // namespace kvferry::oracle
