#pragma once
// The planner's specification by brute force: who owns which (layer, kind, head, token), counted one by one,
// and what every byte of a destination pool must be afterwards. Shares no arithmetic with common/topology and
// common/plan; uses only their plain structs.

#include <cstdint>
#include <string>
#include <vector>

#include "common/plan/plan.h"

namespace kvferry::oracle {

/// Heads of tp rank `tp`, in a group g of G = tp/dcp: H*g/G .. when G <= H, the one head g*H/G when G > H,
/// {0} for MLA.
std::vector<std::uint32_t> heads(const ModelGeometry& model, const Topology& topology, std::uint32_t tp);
std::vector<std::uint32_t> layers(const ModelGeometry& model, const Topology& topology, std::uint32_t pp);
bool owns_token(const Topology& topology, std::uint32_t tp, std::uint64_t token);
/// Tokens of [from, to) that tp rank `tp` owns, counted.
std::uint64_t owned_in(const Topology& topology, std::uint32_t tp, std::uint64_t from, std::uint64_t to);
/// Which CP rank sends `token` of a request that moves [begin, end), its pages dealt out one by one.
std::uint32_t cp_sender(const Topology& topology, std::uint32_t page_size, std::uint64_t begin,
                        std::uint64_t end, std::uint64_t token);
/// True when layer `layer` has KV buffers at all.
bool layer_has_kv(const ModelGeometry& model, std::uint32_t layer);

/// One side is usable on its own: every (layer, head, token) has an owner, heads are whole, sizes divide.
bool side_is_legal(const ModelGeometry& model, const Topology& topology, std::uint32_t page_size);
/// The two sides can be mapped: both legal, and decode does not split tokens over CP ranks.
bool pair_is_legal(const ModelGeometry& model, const Topology& prefill, std::uint32_t prefill_page,
                   const Topology& decode, std::uint32_t decode_page);

/// The content of one byte: which coordinate it is. 0 is "nothing of this request".
std::uint64_t tag(std::uint32_t layer, BufferKind kind, std::uint32_t head, std::uint64_t token,
                  std::uint32_t byte);

/// What one rank's pool holds of one request, computed on read.
class RankView {
 public:
  /// `pages[k]` holds the k-th page_size owned tokens from `first_token` on; tokens from `end` on are absent.
  RankView(const ModelGeometry& model, const RankShape& shape, std::uint64_t first_token, std::uint64_t end,
           const std::vector<std::uint32_t>& pages);
  /// The tag of byte `byte` of row `row` of buffer `buffer`; 0 when nothing of the request lies there.
  std::uint64_t read(std::uint32_t buffer, std::uint64_t row, std::uint32_t byte) const;
  /// The token in `row`, or -1.
  std::int64_t token_at(std::uint64_t row) const;
  std::uint64_t rows() const { return tokens_.size(); }

 private:
  const ModelGeometry& model_;
  const RankShape& shape_;
  std::vector<std::uint32_t> heads_;
  std::vector<std::int64_t> tokens_;  // by physical row
};

/// A destination pool that records what is written: tag and number of writes per byte.
class Written {
 public:
  explicit Written(const RankShape& shape);
  /// Executes `plan`, byte by byte. False (and a reason) on any access outside either pool.
  bool apply(const Plan& plan, const RankShape& src_shape, const RankView& src, std::string& why);
  /// Every byte of tokens [begin, end) that `view` owns: written once, right tag. All others: untouched.
  bool matches(const RankView& view, std::uint64_t begin, std::uint64_t end, std::string& why) const;

 private:
  struct Cell {
    std::uint64_t tag = 0;
    std::uint32_t writes = 0;
  };
  const RankShape& shape_;
  std::vector<std::vector<Cell>> cells_;  // buffer, row * row_bytes + byte
};

}  // namespace kvferry::oracle
