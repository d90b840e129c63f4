// How evenly the prefill ranks that hold the same KV share the work of sending it. Prompts are a whole number
// of token periods of both sides, so that destinations with the same heads and layers take equal shares;
// otherwise one may take up to an interleave of tokens more than another.
#include <fmt/format.h>
#include <catch2/catch.hpp>

#include <algorithm>
#include <map>
#include <numeric>

#include "common/topology/rank_map.h"
#include "tests/unit/plan/oracle.h"
#include "tests/unit/plan/plan_world.h"

namespace kvferry {
namespace {

constexpr std::uint32_t kPage = 4;
constexpr Room kRooms = 40;

ModelGeometry small_model(AttentionKind attention, std::uint32_t heads) {
  ModelGeometry model;
  model.name = "small";
  model.dtype = Dtype::kInt8;
  model.hidden_layers = 4;
  model.kv_layers = {0, 1, 2, 3};
  model.attention = attention;
  model.kv_heads = heads;
  (attention == AttentionKind::kMla ? model.latent_dim : model.head_dim) = 4;
  model.v_head_dim = model.head_dim;
  return model;
}

/// What makes two prefill ranks copies of each other: the same stage, CP rank, heads and tokens.
struct Content {
  std::uint32_t pp = 0;
  std::uint32_t cp = 0;
  std::vector<std::uint32_t> heads;
  std::uint32_t dcp_rank = 0;
  friend auto operator<=>(const Content&, const Content&) = default;
};

/// Two sides, and the bytes that every prefill rank would send to every decode rank.
class Fleet {
 public:
  Fleet(const ModelGeometry& model, const Topology& prefill, const Topology& decode)
      : model_(model), prefill_(prefill), decode_(decode) {
    const std::uint64_t tokens = std::uint64_t{2} * prefill.cp * std::lcm(prefill.dcp, decode.dcp) * kPage;
    std::vector<std::uint32_t> pages(tokens / kPage);
    std::iota(pages.begin(), pages.end(), 0u);
    const auto shape = [&](const Topology& topology, RankIndex rank) {
      const RankCoord coord = topology.coord(rank);
      return RankShape{topology, coord, kPage, rank_buffers(model, topology, coord, pages.size())};
    };
    for (RankIndex src = 0; src < prefill.rank_count(); ++src) {
      const RankCoord at = prefill.coord(src);
      copies_[{at.pp, at.cp, oracle::heads(model, prefill, at.tp), at.tp % prefill.dcp}].push_back(src);
      for (RankIndex dst = 0; dst < decode.rank_count(); ++dst) {
        const PairLayout layout = pair_layout(model, shape(prefill, src), shape(decode, dst)).value();
        const ChunkRequest chunk{0, tokens, 0, 0, pages, pages, {0, tokens}};
        shares_[{src, dst}] = plan_chunk(layout, chunk).value().bytes;
      }
    }
  }

  /// Empty, or what is wrong with how copies share their work.
  std::string fault() const {
    std::vector<std::uint64_t> ever(prefill_.rank_count());
    for (Room room = 1; room <= kRooms; ++room) {
      const std::vector<std::uint64_t> bytes = sent(room);
      for (const auto& [content, sources] : copies_) {
        const auto [least, most] = std::minmax_element(
            sources.begin(), sources.end(), [&](RankIndex a, RankIndex b) { return bytes[a] < bytes[b]; });
        if (bytes[*most] - bytes[*least] > unit(sources)) {
          return fmt::format(
              "room {}: rank {} sends {} bytes and its copy {} sends {}; a destination's share is {}", room,
              *most, bytes[*most], *least, bytes[*least], unit(sources));
        }
      }
      std::transform(ever.begin(), ever.end(), bytes.begin(), ever.begin(), std::plus<>());
    }
    for (RankIndex src = 0; src < prefill_.rank_count(); ++src) {
      // With no split, CP rank 0 sends for all.
      const bool is_dummy = prefill_.cp_split == CpSplit::kNone && prefill_.coord(src).cp > 0;
      if ((ever[src] == 0) != is_dummy) {
        return fmt::format("rank {} sent {} bytes over {} rooms", src, ever[src], kRooms);
      }
    }
    return {};
  }

 private:
  /// Bytes that each prefill rank sends for `room`.
  std::vector<std::uint64_t> sent(Room room) const {
    std::vector<std::uint64_t> bytes(prefill_.rank_count());
    for (RankIndex dst = 0; dst < decode_.rank_count(); ++dst) {
      for (const RankIndex src : decode_targets(model_, prefill_, decode_, dst, 0, room).sources) {
        bytes[src] += shares_.at({src, dst});
      }
    }
    return bytes;
  }

  /// The largest share of one destination that one of `sources` ever sends.
  std::uint64_t unit(const std::vector<RankIndex>& sources) const {
    std::uint64_t most = 0;
    for (const RankIndex src : sources) {
      for (RankIndex dst = 0; dst < decode_.rank_count(); ++dst) {
        most = std::max(most, shares_.at({src, dst}));
      }
    }
    return most;
  }

  const ModelGeometry& model_;
  const Topology& prefill_;
  const Topology& decode_;
  std::map<Content, std::vector<RankIndex>> copies_;
  std::map<std::pair<RankIndex, RankIndex>, std::uint64_t> shares_;
};

/// All (tp, dcp) with dcp dividing tp, beside DCP with interleaves of 1 and 2.
std::vector<Topology> token_layouts(const std::vector<std::uint32_t>& sizes) {
  std::vector<Topology> out;
  for (const std::uint32_t tp : sizes) {
    for (std::uint32_t dcp = 1; dcp <= tp; ++dcp) {
      for (std::uint32_t interleave = 1; tp % dcp == 0 && interleave <= std::min(dcp, 2u); ++interleave) {
        Topology& topology = out.emplace_back();
        topology.tp = tp;
        topology.dcp = dcp;
        topology.dcp_interleave = interleave;
      }
    }
  }
  return out;
}

/// All small (tp, dcp, cp, pp), with each of `splits` beside CP.
std::vector<Topology> rank_layouts(std::initializer_list<CpSplit> splits) {
  std::vector<Topology> out;
  for (const std::uint32_t tp : {1u, 2u, 4u}) {
    for (const std::uint32_t dcp : {1u, 2u}) {
      for (const std::uint32_t cp : {1u, 2u}) {
        for (const CpSplit split : splits) {
          for (const std::uint32_t pp : {1u, 2u, 3u}) {
            if (tp % dcp == 0 && (cp > 1 || split == CpSplit::kNone)) {
              Topology& topology = out.emplace_back();
              topology.tp = tp;
              topology.dcp = dcp;
              topology.cp = cp;
              topology.cp_split = split;
              topology.pp = pp;
            }
          }
        }
      }
    }
  }
  return out;
}

/// Returns how many legal pairs there were.
std::uint64_t require_balance(const std::vector<Topology>& prefills, const std::vector<Topology>& decodes) {
  std::uint64_t pairs = 0;
  for (const ModelGeometry& model : {small_model(AttentionKind::kMla, 1), small_model(AttentionKind::kMha, 2),
                                     small_model(AttentionKind::kMha, 4)}) {
    for (const Topology& prefill : prefills) {
      for (const Topology& decode : decodes) {
        if (!validate_pair(model, prefill, decode)) {
          continue;
        }
        ++pairs;
        const std::string fault = Fleet(model, prefill, decode).fault();
        if (!fault.empty()) {
          FAIL(test::describe({model, prefill, decode, kPage, kPage}) << ": " << fault);
        }
      }
    }
  }
  return pairs;
}

}  // namespace

// Claim: for every room the bytes that copies send differ by at most the share of one destination, and over
// many rooms every copy sends.
TEST_CASE("copies of the same KV share the work of every room, whatever the TP and DCP sizes") {
  const std::vector<Topology> layouts =
      token_layouts(test::long_mode() ? std::vector<std::uint32_t>{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16}
                                      : std::vector<std::uint32_t>{1, 2, 3, 4, 6, 8});
  CHECK(require_balance(layouts, layouts) >= 1300);
}

TEST_CASE("copies of the same KV share the work of every room, with CP and PP on both sides") {
  CHECK(require_balance(rank_layouts({CpSplit::kNone, CpSplit::kPages, CpSplit::kZigzag}),
                        rank_layouts({CpSplit::kNone})) >= 5000);
}

}  // namespace kvferry
