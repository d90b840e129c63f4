// Faults that other products have been seen to have (shared case list, BL-...), as far as the planner and the
// rank map are concerned, each with its kind and not with its numbers alone. Others of the list are in
// planner_test.cc (BL-01, BL-17, BL-52) and rank_map_test.cc (BL-22, BL-23).
#include <fmt/format.h>
#include <catch2/catch.hpp>

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>

#include "common/plan/plan.h"
#include "common/topology/rank_map.h"
#include "tests/support/rng.h"

namespace kvferry {
namespace {

using Catch::Matchers::Contains;
using Pages = std::vector<std::uint32_t>;
using Ranks = std::vector<RankIndex>;

/// No two of them neighbours.
Pages scattered(std::uint32_t count, std::uint64_t seed) {
  Pages pages(count);
  for (std::uint32_t i = 0; i < count; ++i) {
    pages[i] = 2 * i;
  }
  test::Rng(seed).shuffle(pages);
  return pages;
}

/// A latent of 576 elements in `layers` layers.
ModelGeometry mla(std::uint32_t layers, Dtype dtype = Dtype::kBf16) {
  ModelGeometry model = *preset_geometry("deepseek-v3");
  model.hidden_layers = layers;
  model.kv_layers.resize(layers);
  model.draft_layers = 0;
  model.dtype = dtype;
  return model;
}

ModelGeometry mha(std::uint32_t heads, std::uint32_t head_dim) {
  ModelGeometry model = *preset_geometry("llama-3.1-8b");
  model.kv_heads = heads;
  model.head_dim = model.v_head_dim = head_dim;
  return model;
}

RankShape shape(const ModelGeometry& model, const Topology& topology, RankIndex rank, std::uint32_t page_size,
                std::uint64_t pages = 1u << 20) {
  const RankCoord coord = topology.coord(rank);
  return {topology, coord, page_size, rank_buffers(model, topology, coord, pages)};
}

PairLayout pair(const ModelGeometry& model, const char* prefill, RankIndex src, const char* decode,
                RankIndex dst, std::uint32_t page_size) {
  return pair_layout(model, shape(model, *parse_topology(prefill), src, page_size),
                     shape(model, *parse_topology(decode), dst, page_size))
      .value();
}

/// Stretches of a plan that are contiguous at the destination: the fewest writes one buffer can do with.
std::uint64_t contiguous_writes(const Plan& plan) {
  std::uint64_t writes = 0;
  std::uint64_t next = std::numeric_limits<std::uint64_t>::max();
  for (const RowRun& run : plan.runs) {
    const bool dense = run.dst_step == run.rows;
    writes += dense ? (run.dst_row == next ? 0 : 1) : run.count;
    next = run.dst_row + std::uint64_t{run.count - 1} * run.dst_step + run.rows;
  }
  return writes;
}

/// The source rows of a plan, in order.
std::vector<std::uint64_t> source_rows(const Plan& plan) {
  std::vector<std::uint64_t> rows;
  for (const RowRun& run : plan.runs) {
    for (std::uint64_t piece = 0; piece < run.count; ++piece) {
      for (std::uint64_t row = 0; row < run.rows; ++row) {
        rows.push_back(run.src_row + piece * run.src_step + row);
      }
    }
  }
  return rows;
}

}  // namespace

// A cached prefix far beyond what one chunk of prefill computes. The work must follow the pages, not the
// tokens.
TEST_CASE("BL-03: a long cached prefix over DCP 8 is planned by pages, never by tokens and layers") {
  constexpr std::uint32_t kPrefix = 42624;
  constexpr std::uint32_t kPage = 64;
  constexpr std::uint64_t kPerTokenAndLayer = 127872;  // 5,328 tokens of a rank, 24 layers
  const ModelGeometry model = mla(24);
  const Pages src = scattered(kPrefix / kPage + 1, 3);
  const Pages dst = scattered((kPrefix + 64 + 511) / 512, 4);
  for (RankIndex rank = 0; rank < 8; ++rank) {
    const PairLayout layout = pair(model, "tp=1", 0, "tp=8,dcp=8", rank, kPage);
    const Plan prefix = plan_chunk(layout, {0, kPrefix, 0, 0, src, dst}).value();
    CHECK(prefix.rows == 5328);
    CHECK(prefix.bytes == 5328ull * 24 * 1152);
    CHECK(prefix.runs.size() <= src.size() + dst.size());
    // Gathered, it is one write per destination page and layer.
    CHECK(contiguous_writes(prefix) == 84);
    CHECK(contiguous_writes(prefix) * 24 * 60 < kPerTokenAndLayer);
    const Pages dense = {5, 6, 7, 8};
    CHECK(contiguous_writes(plan_chunk(layout, {0, 2048, 0, 0, src, dense}).value()) == 1);

    const Plan more = plan_chunk(layout, {kPrefix, kPrefix + 64, 0, 0, src, dst}).value();
    CHECK(more.rows == 8);
    CHECK(more.runs.size() == 1);

    // Cut into segments of 8,192 tokens: no rank has more than its 1,024 rows in one, and nothing is lost.
    std::vector<std::uint64_t> rows;
    std::uint32_t segments = 0;
    for (std::uint32_t begin = 0; begin < kPrefix; begin += 8192, ++segments) {
      const std::uint32_t end = std::min(begin + 8192, kPrefix);
      const Plan segment = plan_chunk(layout, {begin, end, 0, 0, src, dst}).value();
      CHECK(segment.rows <= 1024);
      const std::vector<std::uint64_t> part = source_rows(segment);
      rows.insert(rows.end(), part.begin(), part.end());
    }
    CHECK(segments == 6);
    CHECK(rows == source_rows(prefix));
  }
  // A decode side without DCP gets whole pages from the same prefill.
  const Pages whole = scattered(kPrefix / kPage + 1, 5);
  const Plan plan =
      plan_chunk(pair(model, "tp=1", 0, "tp=1", 0, kPage), {0, kPrefix, 0, 0, src, whole}).value();
  CHECK(plan.rows == kPrefix);
  CHECK(plan.runs.size() <= src.size());
  CHECK(contiguous_writes(plan) == plan.runs.size());
}

TEST_CASE("BL-03: runs grow with the pages, whatever the prompt, page size and DCP sizes") {
  for (const std::uint32_t page : {16u, 64u, 128u}) {
    for (const char* prefill : {"tp=1", "tp=2,dcp=2", "tp=8,dcp=8"}) {
      for (const char* decode : {"tp=1", "tp=3,dcp=3", "tp=4,dcp=4", "tp=8,dcp=8"}) {
        for (const std::uint32_t tokens : {1000u, 40000u}) {
          const Pages src = scattered(tokens / page + 1, 1);
          const Pages dst = scattered(tokens / page + 1, 2);
          const PairLayout layout = pair(mla(2), prefill, 0, decode, 0, page);
          const Plan plan = plan_chunk(layout, {0, tokens, 0, 0, src, dst}).value();
          const std::uint64_t src_pages = tokens / page / layout.src_tokens.count + 1;
          const std::uint64_t dst_pages = tokens / page / layout.dst_tokens.count + 1;
          INFO(prefill << " -> " << decode << " page " << page << " tokens " << tokens);
          CHECK(plan.runs.size() <= src_pages + dst_pages);
        }
      }
    }
  }
}

// The report's workers hold disjoint blocks by (cp, dcp). Here every CP rank holds its DCP rank's rows of the
// whole request, and CP divides who sends them; a CP rank that holds its own blocks only is said as a larger
// DCP.
TEST_CASE("BL-04: with CP beside DCP on prefill each block moves once, from a worker that holds it") {
  constexpr std::uint32_t kBlock = 16;
  constexpr std::uint32_t kBlocks = 16;
  const ModelGeometry model = mla(1);
  const Pages local{0, 1, 2, 3, 4, 5, 6, 7};  // a DCP rank's pages; row / kBlock is the page
  const Pages dst = scattered(kBlocks, 6);
  const auto blocks_from = [&](const std::string& prefill, const RankCoord& from, std::uint32_t dcp) {
    const Topology topology = *parse_topology(prefill);
    const PairLayout layout = pair(model, prefill.c_str(), topology.rank_index(from), "tp=1", 0, kBlock);
    const ChunkRequest chunk{0, kBlock * kBlocks, 0, 0, local, dst, {0, kBlock * kBlocks}};
    std::set<std::uint64_t> blocks;
    for (const std::uint64_t row : source_rows(plan_chunk(layout, chunk).value())) {
      blocks.insert(row / kBlock * dcp + from.tp % dcp);
    }
    return std::vector<std::uint64_t>(blocks.begin(), blocks.end());
  };
  using Blocks = std::vector<std::uint64_t>;
  const std::string both = "tp=2,dcp=2,interleave=16,cp=2,cp_split=";
  CHECK(blocks_from(both + "pages", {1, 0, 1, 0}, 2) == Blocks{9, 11, 13, 15});
  CHECK(blocks_from(both + "zigzag", {1, 0, 1, 0}, 2) == Blocks{5, 7, 9, 11});
  CHECK(blocks_from(both + "none", {1, 0, 1, 0}, 2).empty());
  CHECK(blocks_from(both + "none", {1, 0, 0, 0}, 2) == Blocks{1, 3, 5, 7, 9, 11, 13, 15});
  for (const char* split : {"none", "pages", "zigzag"}) {
    Blocks all;
    for (RankIndex worker = 0; worker < 4; ++worker) {
      const Blocks some = blocks_from(both + split, {worker % 2, 0, worker / 2, 0}, 2);
      all.insert(all.end(), some.begin(), some.end());
    }
    std::sort(all.begin(), all.end());
    Blocks every(kBlocks);
    std::iota(every.begin(), every.end(), std::uint64_t{0});
    INFO(split);
    CHECK(all == every);
  }
  CHECK(blocks_from("tp=4,dcp=4,interleave=16", {3, 0, 0, 0}, 4) == Blocks{3, 7, 11, 15});
  CHECK_THAT(parse_topology("tp=2,dcp=2,cp=2,cp_split=blocks").error().message,
             Contains("cp_split \"blocks\" is none of none, pages, zigzag"));
}

TEST_CASE(
    "BL-05: draft entries of another size are refused by layer and both sizes; the next peer is served") {
  const ModelGeometry model = mla(34, Dtype::kInt8);  // 576 B per token
  const Topology prefill;
  const Topology decode = *parse_topology("tp=8,dcp=8");
  RankShape src = shape(model, prefill, 0, 64);
  const RankShape dst = shape(model, decode, 0, 64);
  REQUIRE(src.buffers.size() == 34);
  for (std::size_t entry = 24; entry < 34; ++entry) {
    src.buffers[entry].row_bytes = 128;
  }
  const auto refused = pair_layout(model, src, dst);
  REQUIRE_FALSE(refused);
  CHECK(refused.error().code == Code::kMismatch);
  CHECK_THAT(refused.error().message, Contains("layer 24 latent") &&
                                          Contains("prefill has row_bytes 128 and needs 576") &&
                                          Contains("decode has row_bytes 576"));
  // The same said by layer ids: what the model does not have, a source cannot send.
  RankShape with_draft = shape(mla(24, Dtype::kInt8), prefill, 0, 64);
  with_draft.buffers.push_back({24, BufferKind::kLatent, 128, 1u << 20});
  const auto draft =
      pair_layout(mla(24, Dtype::kInt8), with_draft, shape(mla(24, Dtype::kInt8), decode, 0, 64));
  REQUIRE_FALSE(draft);
  CHECK_THAT(draft.error().message,
             Contains("prefill buffer 24 holds layer 24") && Contains("layers 0 to 23"));

  const Pages pages{7, 3};
  std::uint64_t rows = 0;
  for (RankIndex rank = 0; rank < 8; ++rank) {
    rows +=
        plan_chunk(pair(model, "tp=1", 0, "tp=8,dcp=8", rank, 64), {0, 100, 0, 0, pages, pages}).value().rows;
  }
  CHECK(rows == 100);
}

TEST_CASE("BL-09: decode TP above the heads: each rank gets its one head, none gets nothing") {
  struct Row {
    std::uint32_t heads;
    std::uint32_t prefill_tp;
    std::uint32_t decode_tp;
  };
  for (const Row& row :
       {Row{2, 1, 4}, Row{2, 1, 8}, Row{4, 4, 8}, Row{4, 2, 8}, Row{1, 1, 8}, Row{2, 2, 16}}) {
    const ModelGeometry model = mha(row.heads, 256);
    constexpr std::uint32_t kHeadBytes = 512;
    const std::uint32_t copies = row.decode_tp / row.heads;
    const std::string prefill = fmt::format("tp={}", row.prefill_tp);
    const std::string decode = fmt::format("tp={}", row.decode_tp);
    for (RankIndex rank = 0; rank < row.decode_tp; ++rank) {
      INFO(row.heads << " heads, " << prefill << " -> " << decode << " rank " << rank);
      const std::uint32_t head = rank / copies;
      const std::uint32_t each = row.heads / row.prefill_tp;
      const auto sources =
          decode_targets(model, *parse_topology(prefill), *parse_topology(decode), rank, 0, 9).sources;
      CHECK(sources == Ranks{head / each});
      const PairLayout layout = pair(model, prefill.c_str(), head / each, decode.c_str(), rank, 16);
      REQUIRE(layout.pairs.size() == 64);
      for (const BufferPair& buffers : layout.pairs) {
        REQUIRE(buffers.bytes == kHeadBytes);
        REQUIRE(buffers.dst_row_bytes == kHeadBytes);
        REQUIRE(buffers.src_offset == head % each * kHeadBytes);
        REQUIRE(buffers.dst_offset == 0);
      }
    }
  }
}

// The DP rank that a room was routed to is the process's own; attention TP, CP and PP ranks live inside it.
TEST_CASE("BL-15: a room of one DP rank never meets a rank of another") {
  for (const char* inner : {"tp=1", "tp=2", "tp=4,pp=2", "tp=2,cp=2,cp_split=pages", "tp=4,dcp=2"}) {
    for (const std::uint32_t size : {2u, 3u}) {
      Topology prefill = *parse_topology(inner);
      prefill.dp = size;
      const RankIndex ranks = prefill.rank_count() / size;
      Topology decode = *parse_topology("tp=2,dp=2");
      std::set<RankIndex> met;
      for (Room room = 1; room <= 16; ++room) {
        const auto dp = static_cast<std::uint32_t>(room % size);
        for (RankIndex rank = 0; rank < decode.rank_count(); ++rank) {
          const DecodeTargets to = decode_targets(mla(8), prefill, decode, rank, dp, room);
          REQUIRE_FALSE(to.sources.empty());
          for (const RankIndex target : to.targets) {
            REQUIRE(target / ranks == dp);
            REQUIRE(prefill.coord(target).dp == dp);
            met.insert(target);
          }
          // And back: a prefill rank waits for the grants of the room's decode DP rank only.
          for (const RankIndex other :
               prefill_destinations(mla(8), prefill, decode, to.aux_source, decode.coord(rank).dp)) {
            REQUIRE(decode.coord(other).dp == decode.coord(rank).dp);
          }
        }
      }
      CHECK(met.size() == prefill.rank_count());
    }
  }
}

TEST_CASE("BL-52: rows, indices and steps beyond 32 bits keep all their bits") {
  // MHA: 131,072 B pages, the last one asked for starts exactly at 2^31.
  const Pages pages{0, 16383, 16384};
  const PairLayout heads = pair(mha(8, 128), "tp=1", 0, "tp=2", 1, 64);
  const Plan sliced = plan_chunk(heads, {0, 192, 0, 0, pages, pages}).value();
  REQUIRE(sliced.runs.size() == 2);
  CHECK(sliced.runs[1].src_row + 64 == 16384 * 64);
  CHECK((sliced.runs[1].src_row + 64) * sliced.pairs[0].src_row_bytes == 1ull << 31);
  CHECK(sliced.pairs[0].src_offset == 1024);

  // The highest page number there is, in a pool that has it.
  const ModelGeometry model = mla(1);
  const Topology one;
  constexpr std::uint64_t kPages = 1ull << 32;
  const PairLayout wide =
      pair_layout(model, shape(model, one, 0, 64, kPages), shape(model, one, 0, 64, kPages)).value();
  const Pages last{0xFFFFFFFEu, 0xFFFFFFFFu};
  const Plan end = plan_chunk(wide, {0, 128, 0, 0, last, last}).value();
  REQUIRE(end.runs.size() == 1);
  CHECK(end.runs[0].src_row == 0xFFFFFFFEull * 64);
  CHECK(end.runs[0].dst_row == 0xFFFFFFFEull * 64);

  // More rows in one stretch than a run can count: more runs, and not one row less.
  constexpr std::uint32_t kHugePage = 1u << 31;
  const Pages four{4, 5, 6, 7};
  const auto huge = [&](const char* decode) { return pair(model, "tp=1", 0, decode, 0, kHugePage); };
  const auto follows = [](const Plan& plan) {
    std::uint64_t src = 4ull * kHugePage;
    std::uint64_t index = 0;
    for (const RowRun& run : plan.runs) {
      if (run.src_row != src || run.dst_index != index || run.dst_row != 4ull * kHugePage + index) {
        return false;
      }
      src += std::uint64_t{run.count} * run.src_step;
      index += std::uint64_t{run.count} * run.dst_step;
    }
    return index == plan.rows;
  };
  const Plan dense = plan_chunk(huge("tp=1"), {0, 4ull * kHugePage, 0, 0, four, four}).value();
  CHECK(dense.rows == 4ull * kHugePage);
  CHECK(dense.runs.size() > 1);
  CHECK(follows(dense));
  const Plan strided = plan_chunk(huge("tp=2,dcp=2"), {0, 4ull * kHugePage, 0, 0, four, four}).value();
  CHECK(strided.rows == 2ull * kHugePage);
  CHECK(strided.runs.size() > 1);
  CHECK(follows(strided));
}

}  // namespace kvferry
