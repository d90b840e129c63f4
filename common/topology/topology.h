#pragma once
// The parallel layout of one side, and what one rank of it owns. Ownership is the only input of the planner:
// layers by PP stage, heads by TP (replicated when there are more ranks than heads), tokens by DCP. A rank is
// one (dp, pp, cp, tp) coordinate. DCP divides the TP group: neighbours of `dcp` ranks share their heads and
// split the tokens, so heads are sharded over tp/dcp and the DCP rank is tp mod dcp.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/ids.h"
#include "common/base/result.h"
#include "common/model/geometry.h"

namespace kvferry {

inline constexpr std::uint32_t kParallelSizeMax = 4096;       // each of tp, pp, cp, dp
inline constexpr std::uint32_t kRanksMax = 1u << 20;          // ranks of one side
inline constexpr std::uint32_t kDcpInterleaveMax = 1u << 16;  // tokens

/// Which CP rank of prefill sends which tokens. Every CP rank holds the request's rows in pages that cover
/// all of it (attention gathers them), so this divides the work and not the addresses.
enum class CpSplit : std::uint8_t {
  kNone,    // CP rank 0 sends all, the others are dummies; on decode: every CP rank holds everything
  kPages,   // CP rank k sends the k-th of cp nearly equal stretches of pages (pd-spec 6.4)
  kZigzag,  // CP rank k sends stretches k and 2*cp-1-k of 2*cp
};
std::string_view to_string(CpSplit split);  // "none", "pages", "zigzag"
Result<CpSplit> parse_cp_split(std::string_view text);

struct RankCoord {
  std::uint32_t tp = 0;
  std::uint32_t pp = 0;
  std::uint32_t cp = 0;
  std::uint32_t dp = 0;
  friend auto operator<=>(const RankCoord&, const RankCoord&) = default;
};

struct Topology {
  std::uint32_t tp = 1;  // attention TP size: ranks that share one request's heads
  std::uint32_t pp = 1;
  std::uint32_t cp = 1;  // attention context parallelism
  CpSplit cp_split = CpSplit::kNone;
  std::uint32_t dp = 1;
  std::uint32_t dcp = 1;             // decode context parallelism; divides tp
  std::uint32_t dcp_interleave = 1;  // owner of token t is (t div interleave) mod dcp
  std::vector<std::uint32_t>
      pp_layers;  // hidden layers per stage; empty = even split, first stages get the rest

  std::uint32_t rank_count() const { return tp * pp * cp * dp; }
  /// Position in the side's rank order: ((dp*pp_size + pp)*cp_size + cp)*tp_size + tp.
  RankIndex rank_index(const RankCoord& coord) const;
  RankCoord coord(RankIndex index) const;
  std::uint32_t dcp_rank(const RankCoord& coord) const { return coord.tp % dcp; }
  /// Ranks that the KV heads are sharded (or replicated) over.
  std::uint32_t head_ranks() const { return tp / dcp; }
  friend bool operator==(const Topology&, const Topology&) = default;
};

/// Sizes in [1, kParallelSizeMax], dcp divides tp, pp_layers fits pp and the layer count, heads divide or
/// replicate over tp/dcp, tp divides every block of recurrent state. Also validates the model. Every
/// violation is in the one message (kInvalid).
Result<void> validate(const Topology& topology, const ModelGeometry& model);

/// "tp=4,dcp=4" (also pp, cp, cp_split, dp, interleave, and pp_layers=31+30), in any order; unknown and
/// repeated keys, zeros and sizes above the limits are refused. to_string() names tp and what differs from
/// the default, and reads back as the same topology.
Result<Topology> parse_topology(std::string_view text);
std::string to_string(const Topology& topology);

/// Half-open interval of layer ids, head ids or token positions.
struct Interval {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::uint64_t size() const { return end > begin ? end - begin : 0; }
  bool contains(std::uint64_t value) const { return value >= begin && value < end; }
  friend auto operator<=>(const Interval&, const Interval&) = default;
};
Interval intersect(const Interval& a, const Interval& b);

/// Tokens t with (t div interleave) mod count == rank.
struct TokenClass {
  std::uint32_t count = 1;
  std::uint32_t rank = 0;
  std::uint32_t interleave = 1;
  bool owns(std::uint64_t token) const { return (token / interleave) % count == rank; }
  /// How many owned tokens lie in [0, token): the local row of an owned token, counted from position 0.
  std::uint64_t owned_before(std::uint64_t token) const;
  /// True when both classes own the same tokens.
  bool same_tokens(const TokenClass& other) const;
  /// True when some token belongs to both.
  bool meets(const TokenClass& other) const;
  /// How many of the ranks [0, end) of `other`'s group share a token with this class; end at most
  /// other.count.
  std::uint32_t met_before(const TokenClass& other, std::uint32_t end) const;
  friend bool operator==(const TokenClass&, const TokenClass&) = default;
};

struct Ownership {
  Interval layers;             // hidden layer ids of the PP stage
  bool last_stage = false;     // which also has the draft model's layers
  Interval heads;              // global KV head ids (MLA: [0,1) on every rank)
  std::uint32_t replicas = 1;  // ranks of this side's TP group that own the same heads and tokens
  std::uint32_t replica = 0;   // which of them this is
  TokenClass tokens;

  /// Whether a layer of the target or of the draft model is on this rank's stage.
  bool has_layer(const ModelGeometry& model, std::uint32_t layer) const {
    return layer < model.hidden_layers ? layers.contains(layer)
                                       : last_stage && layer - model.hidden_layers < model.draft_layers;
  }
};

/// What `coord` owns. Call validate() first; an illegal topology is a broken invariant here.
Ownership ownership(const Topology& topology, const ModelGeometry& model, const RankCoord& coord);

/// The PP stage that holds hidden layer `layer`. The topology must be valid for `hidden_layers`.
std::uint32_t stage_of(const Topology& topology, std::uint32_t hidden_layers, std::uint64_t layer);

/// One CP rank among its peers.
struct CpPlace {
  CpSplit split = CpSplit::kNone;
  std::uint32_t count = 1;
  std::uint32_t rank = 0;
};

/// The part of the request's tokens that the CP rank sends, as ascending intervals (at most two, none empty),
/// cut at whole pages of `page_tokens` counted from request.begin.
std::vector<Interval> cp_share(const CpPlace& place, std::uint64_t page_tokens, const Interval& request);

}  // namespace kvferry
