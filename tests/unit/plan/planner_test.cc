#include <catch2/catch.hpp>

#include <numeric>
#include <set>

#include "common/plan/dcp_token_plan.h"
#include "common/plan/plan.h"
#include "common/plan/tp_slice.h"
#include "tests/support/rng.h"

namespace kvferry {
namespace {

using Catch::Matchers::Contains;
using Pages = std::vector<std::uint32_t>;

constexpr std::uint64_t kPoolPages = 1u << 20;

Pages range(std::uint32_t first, std::size_t count) {
  Pages pages(count);
  std::iota(pages.begin(), pages.end(), first);
  return pages;
}

RankShape rank(const ModelGeometry& model, const char* topology, const RankCoord& coord,
               std::uint32_t page_size, std::uint64_t pages = kPoolPages) {
  RankShape shape{*parse_topology(topology), coord, page_size, {}};
  shape.buffers = rank_buffers(model, shape.topology, coord, pages);
  return shape;
}

ModelGeometry mla() {
  return *preset_geometry("kimi-k2");
}

ModelGeometry mha(std::uint32_t heads, std::uint32_t head_dim = 128) {
  ModelGeometry model = *preset_geometry("llama-3.1-8b");
  model.kv_heads = heads;
  model.head_dim = model.v_head_dim = head_dim;
  return model;
}

PairLayout dcp_layout(std::uint32_t ranks, std::uint32_t rank_index, std::uint32_t page_size) {
  const ModelGeometry model = mla();
  const std::string decode = "tp=" + std::to_string(ranks) + ",dcp=" + std::to_string(ranks);
  return *pair_layout(model, rank(model, "tp=1", {}, page_size),
                      rank(model, decode.c_str(), {rank_index, 0, 0, 0}, page_size));
}

PairLayout same_layout(std::uint32_t page_size) {
  const ModelGeometry model = mla();
  return *pair_layout(model, rank(model, "tp=1", {}, page_size), rank(model, "tp=1", {}, page_size));
}

std::string error_of(const Result<Plan>& plan) {
  return plan ? "" : plan.error().message;
}

}  // namespace

TEST_CASE("same layout: one run per physically consecutive stretch, one pair per layer") {
  const Pages src{10, 11, 20};
  const Pages dst{5, 6, 7};
  const Plan plan = plan_chunk(same_layout(64), {0, 192, 0, 0, src, dst}).value();
  CHECK(plan.runs == std::vector<RowRun>{{640, 320, 0, 128, 1, 128, 128}, {1280, 448, 128, 64, 1, 64, 64}});
  CHECK(plan.pairs.size() == 61);
  CHECK(plan.rows == 192);
  CHECK(plan.bytes == 192 * 70272);
}

TEST_CASE("a partial last page moves only its tokens") {
  const Pages pages{3, 4};
  const Plan plan = plan_chunk(same_layout(64), {0, 65, 0, 0, pages, pages}).value();
  CHECK(plan.runs == std::vector<RowRun>{{192, 192, 0, 65, 1, 65, 65}});
}

TEST_CASE("a full prefix hit is an empty plan and a success") {
  const Plan plan = plan_chunk(same_layout(64), {128, 128, 128, 0, {}, {}}).value();
  CHECK(plan.runs.empty());
  CHECK(plan.bytes == 0);
  // A rank that owns none of five tokens, too (BL-19).
  const Pages page{0};
  CHECK(plan_chunk(dcp_layout(8, 4, 64), {0, 5, 0, 0, page, page}).value().rows == 1);
  CHECK(plan_chunk(dcp_layout(8, 5, 64), {0, 5, 0, 0, page, {}}).value().rows == 0);
}

TEST_CASE("DCP 1 -> N: strided at the source, dense at the destination, one run over consecutive pages") {
  const Pages src = range(100, 16);
  const Pages dst = range(7, 2);
  const Plan plan = plan_chunk(dcp_layout(8, 3, 64), {0, 1024, 0, 0, src, dst}).value();
  CHECK(plan.runs == std::vector<RowRun>{{6400 + 3, 448, 0, 1, 128, 8, 1}});
  Pages scattered = src;
  std::swap(scattered[0], scattered[15]);
  CHECK(plan_chunk(dcp_layout(8, 3, 64), {0, 1024, 0, 0, scattered, dst}).value().runs.size() == 3);
}

TEST_CASE("a plan is the same size for 1 layer and for 61, but for its pairs") {
  ModelGeometry model = mla();
  const auto plan_with_layers = [&model](std::uint32_t layers) {
    model.hidden_layers = layers;
    model.kv_layers.resize(layers);
    const Pages src{1, 3, 5, 7};
    const Pages dst{2, 8};
    const PairLayout layout =
        *pair_layout(model, rank(model, "tp=1", {}, 64), rank(model, "tp=2,dcp=2", {1, 0, 0, 0}, 64));
    return plan_chunk(layout, {0, 256, 0, 0, src, dst}).value();
  };
  const Plan all = plan_with_layers(61);
  const Plan one = plan_with_layers(1);
  CHECK(all.runs == one.runs);
  CHECK(all.pairs.size() == 61);
  CHECK(one.pairs.size() == 1);
  CHECK(all.bytes == 61 * one.bytes);
}

// The published token plan is an independent implementation of the 1 -> N case.
TEST_CASE("runs expand to the published DCP token plan, chunk by chunk, prefix included") {
  const std::uint64_t seed = test::test_seed(11);
  INFO("KVF_SEED=" << seed);
  test::Rng rng(seed);
  for (int i = 0; i < 2000; ++i) {
    const std::uint32_t page = rng.between32(1, 8);
    const std::uint32_t ranks = rng.between32(2, 8);
    const std::uint32_t rank_index = static_cast<std::uint32_t>(rng.below(ranks));
    const std::uint64_t prefix = std::uint64_t{page} * ranks * rng.below(3);
    const std::uint64_t offset = rng.below(6);
    Pages src = range(0, 40);
    rng.shuffle(src);
    src.resize(rng.between(1, 8));
    Pages dst = range(0, 40);
    rng.shuffle(dst);
    dst.resize(rng.below(20));
    const std::uint64_t tokens = rng.below(src.size() * page + 3);
    const auto published =
        build_dcp_token_transfer_plan({src, dst, page, ranks, rank_index, static_cast<std::int64_t>(offset),
                                       static_cast<std::int64_t>(prefix), static_cast<std::int64_t>(tokens)});
    const std::uint64_t begin = prefix + offset * page;
    const auto plan =
        plan_chunk(dcp_layout(ranks, rank_index, page), {begin, begin + tokens, begin, prefix, src, dst});
    if (!published) {
      // The planner judges the source by owned tokens only, so it may accept what names tokens nobody here
      // owns.
      CHECK((!plan || tokens > src.size() * page));
      continue;
    }
    REQUIRE(plan);
    DcpTokenPlan expanded;
    for (const RowRun& run : plan->runs) {
      for (std::uint64_t piece = 0; piece < run.count; ++piece) {
        for (std::uint64_t row = 0; row < run.rows; ++row) {
          expanded.src_rows.push_back(static_cast<std::int64_t>(run.src_row + piece * run.src_step + row));
          expanded.dst_rows.push_back(static_cast<std::int64_t>(run.dst_row + piece * run.dst_step + row));
        }
      }
    }
    REQUIRE(expanded.src_rows == published->src_rows);
    REQUIRE(expanded.dst_rows == published->dst_rows);
  }
}

TEST_CASE("BL-01: 67,137 tokens over DCP 8 with page 128, and one destination page too few") {
  Pages src = range(0, 525);
  test::Rng rng(1);
  rng.shuffle(src);
  const Pages dst = range(1000, 66);
  std::set<std::uint64_t> rows;
  for (std::uint32_t index = 0; index < 8; ++index) {
    const Plan plan = plan_chunk(dcp_layout(8, index, 128), {0, 67137, 0, 0, src, dst}).value();
    CHECK(plan.rows == (index == 0 ? 8393u : 8392u));
    std::uint64_t highest = 0;
    for (const RowRun& run : plan.runs) {
      highest = std::max(highest, run.dst_index + std::uint64_t{run.count - 1} * run.dst_step + run.rows - 1);
      for (std::uint64_t piece = 0; piece < run.count; ++piece) {
        CHECK(run.rows == 1);
        rows.insert(run.src_row + piece * run.src_step);
      }
    }
    CHECK(highest == (index == 0 ? 8392u : 8391u));
    const auto refused =
        plan_chunk(dcp_layout(8, index, 128), {0, 67137, 0, 0, src, std::span(dst).first(65)});
    CHECK_THAT(error_of(refused), Contains("Insufficient destination pages") &&
                                      Contains("needed 66, given 65") &&
                                      Contains("DCP rank " + std::to_string(index) + " of 8"));
  }
  CHECK(rows.size() == 67137);
}

TEST_CASE("BL-17: pages pair by position, never by count or from the tail") {
  const Pages src = range(500, 32);
  const Pages dst = range(0, 33);
  const Plan all = plan_chunk(same_layout(64), {0, 2048, 0, 0, src, dst}).value();
  CHECK(all.runs == std::vector<RowRun>{{500 * 64, 0, 0, 2048, 1, 2048, 2048}});
  // Decode holds blocks 0..30 and lists blocks 31 and 32.
  const Plan rest =
      plan_chunk(same_layout(64), {31 * 64, 2048, 0, 31 * 64, src, std::span(dst).subspan(31)}).value();
  CHECK(rest.runs == std::vector<RowRun>{{531 * 64, 31 * 64, 0, 64, 1, 64, 64}});
}

TEST_CASE("BL-52: rows beyond 2^31 and 2^32 bytes keep all their bits, pages outside the pool are refused") {
  const ModelGeometry model = mla();
  constexpr std::uint64_t kPages = 72818;  // 5 GiB of 73,728 B
  const PairLayout layout =
      *pair_layout(model, rank(model, "tp=1", {}, 64, kPages), rank(model, "tp=1", {}, 64, kPages));
  const Pages pages{0, 29127, 29128, 58254, 58255, kPages - 1};
  const Plan plan = plan_chunk(layout, {0, 384, 0, 0, pages, pages}).value();
  REQUIRE(plan.runs.size() == 4);
  CHECK(plan.runs[1].src_row * 1152 == 29127ull * 73728);
  CHECK((plan.runs[1].src_row + 64) * 1152 == 2147549184);
  CHECK((plan.runs[2].dst_row + 64) * 1152 == 4295024640);
  CHECK(plan.runs[3].dst_row * 1152 == (kPages - 1) * 73728);
  const Pages outside{0, kPages};
  const Pages inside{0, 1};
  CHECK_THAT(error_of(plan_chunk(layout, {0, 128, 0, 0, outside, inside})),
             Contains("source page 72818 is outside the pool of 72818 pages"));
  CHECK_THAT(error_of(plan_chunk(layout, {0, 128, 0, 0, inside, outside})),
             Contains("destination page 72818"));
  const Pages last{0xFFFFFFFFu, 0xFFFFFFFFu};
  CHECK_FALSE(plan_chunk(layout, {0, 128, 0, 0, last, inside}));
  // A page that no token of the chunk uses is nobody's business here.
  CHECK(plan_chunk(layout, {0, 64, 0, 0, outside, inside}));
}

TEST_CASE("a pool whose addresses pass 2^63 is refused") {
  const ModelGeometry model = mla();
  const auto layout =
      pair_layout(model, rank(model, "tp=1", {}, 64, 1ull << 50), rank(model, "tp=1", {}, 64));
  REQUIRE_FALSE(layout);
  CHECK_THAT(layout.error().message, Contains("2^63") && Contains("1125899906842624 pages"));
}

TEST_CASE("chunk errors name needed, given and the rule") {
  const PairLayout layout = dcp_layout(2, 0, 4);
  const Pages src{0, 1};
  const Pages dst{0};
  CHECK_THAT(error_of(plan_chunk(layout, {0, 12, 0, 0, src, dst})),
             Contains("must fit in the provided source pages") && Contains("needed 3, given 2"));
  CHECK_THAT(error_of(plan_chunk(layout, {9, 10, 8, 4, src, dst})),
             Contains("dst_first_token 4 must align to the virtual page of 8 tokens"));
  CHECK_THAT(error_of(plan_chunk(layout, {9, 10, 6, 8, src, dst})), Contains("src_first_token 6"));
  CHECK_THAT(error_of(plan_chunk(layout, {0, 4, 8, 0, src, dst})), Contains("src_first_token 8"));
  CHECK_THAT(error_of(plan_chunk(layout, {4, 0, 0, 0, src, dst})), Contains("[4, 0)"));
  CHECK_FALSE(plan_chunk(layout, {0, ~0ull, 0, 0, src, dst}));
}

TEST_CASE("chunks add up to the plan of the whole request") {
  Pages src = range(0, 32);
  test::Rng rng(5);
  rng.shuffle(src);
  const Pages dst = range(3, 4);
  const PairLayout layout = dcp_layout(8, 2, 64);
  const Plan whole = plan_chunk(layout, {0, 2048, 0, 0, src, dst}).value();
  std::vector<RowRun> joined;
  for (std::uint64_t begin = 0; begin < 2048; begin += 512) {
    const auto part = std::span(src).subspan(begin / 64, 8);
    const Plan plan = plan_chunk(layout, {begin, begin + 512, begin, 0, part, dst}).value();
    joined.insert(joined.end(), plan.runs.begin(), plan.runs.end());
  }
  CHECK(std::accumulate(joined.begin(), joined.end(), std::uint64_t{0},
                        [](std::uint64_t sum, const RowRun& run) {
                          return sum + std::uint64_t{run.rows} * run.count;
                        }) == whole.rows);
  CHECK(joined.front() == whole.runs.front());
  CHECK(joined.back() == whole.runs.back());
}

TEST_CASE("head slices of a pair are the published TP slice config") {
  for (std::uint32_t s : {1u, 2u, 4u, 8u, 16u}) {
    for (std::uint32_t d : {1u, 2u, 4u, 8u, 16u}) {
      for (std::uint32_t heads : {1u, 2u, 4u, 8u, 16u}) {
        const ModelGeometry model = mha(heads);
        const std::string prefill = "tp=" + std::to_string(s);
        const std::string decode = "tp=" + std::to_string(d);
        for (std::uint32_t q = 0; q < d; ++q) {
          for (std::uint32_t p = 0; p < s; ++p) {
            const RankShape src = rank(model, prefill.c_str(), {p, 0, 0, 0}, 16);
            const RankShape dst = rank(model, decode.c_str(), {q, 0, 0, 0}, 16);
            const PairLayout layout = pair_layout(model, src, dst).value();
            const bool target = s >= d ? p / (s / d) == q : p == q / (d / s);
            REQUIRE(layout.pairs.empty() == !target);
            if (!target) {
              continue;
            }
            TpSliceRequest request{s, d, p, q, heads, 0, 0, 16};
            request.src_item_len = 16 * std::int64_t{src.buffers[0].row_bytes};
            request.dst_item_len = 16 * std::int64_t{dst.buffers[0].row_bytes};
            const TpSliceConfig slice = build_tp_slice_config(request).value();
            REQUIRE(layout.pairs.size() == 64);
            for (const BufferPair& pair : layout.pairs) {
              REQUIRE(pair.src_offset == slice.src_offset);
              REQUIRE(pair.dst_offset == slice.dst_offset);
              REQUIRE(pair.bytes == slice.slice_bytes);
            }
          }
        }
      }
    }
  }
}

TEST_CASE("buffers of a rank are K of all layers, then V; one latent per layer for MLA") {
  const ModelGeometry model = *preset_geometry("gpt-oss-120b");
  const auto buffers = rank_buffers(model, *parse_topology("tp=16,pp=2"), {3, 1, 0, 0}, 9);
  REQUIRE(buffers.size() == 36);
  CHECK(buffers[0] == BufferShape{18, BufferKind::kKey, 128, 9});
  CHECK(buffers[17] == BufferShape{35, BufferKind::kKey, 128, 9});
  CHECK(buffers[18] == BufferShape{18, BufferKind::kValue, 128, 9});
  CHECK(rank_buffers(mla(), *parse_topology("tp=4"), {1, 0, 0, 0}, 9).size() == 61);
}

TEST_CASE("uneven pipeline stages pair K with K and V with V by layer id") {
  const ModelGeometry model = mha(8);
  RankShape src = rank(model, "tp=1,pp=2,pp_layers=19+13", {0, 1, 0, 0}, 16);
  const RankShape dst = rank(model, "tp=1", {}, 16);
  const PairLayout layout = pair_layout(model, src, dst).value();
  REQUIRE(layout.pairs.size() == 26);
  CHECK(layout.pairs[0].dst_buffer == 19);
  CHECK(layout.pairs[13].src_buffer == 13);
  CHECK(layout.pairs[13].dst_buffer == 32 + 19);
  // Order inside a pool is the engine's; ids decide.
  std::swap(src.buffers[0], src.buffers[25]);
  CHECK(pair_layout(model, src, dst).value().pairs[0].src_buffer == 25);
}

TEST_CASE("pools that do not fit their topology or each other are refused by layer and field") {
  const ModelGeometry model = mha(8);
  const RankShape good_src = rank(model, "tp=2,pp=2", {0, 0, 0, 0}, 16);
  const RankShape good_dst = rank(model, "tp=2", {0, 0, 0, 0}, 16);
  REQUIRE(pair_layout(model, good_src, good_dst));
  const auto refusal = [&model](const RankShape& src, const RankShape& dst) {
    const auto layout = pair_layout(model, src, dst);
    return layout ? std::string() : layout.error().message;
  };
  RankShape bad = good_dst;
  bad.buffers.erase(bad.buffers.begin() + 3);
  CHECK_THAT(refusal(good_src, bad), Contains("layer 3 key: the decode pool has no such buffer"));
  bad = good_src;
  bad.buffers.pop_back();
  CHECK_THAT(refusal(bad, good_dst), Contains("layer 15 value: the prefill pool has no such buffer"));
  bad = good_dst;
  bad.buffers[5].row_bytes /= 2;
  CHECK_THAT(refusal(good_src, bad), Contains("layer 5 key") &&
                                         Contains("prefill has row_bytes 1024 and needs 1024 (4 heads)") &&
                                         Contains("decode has row_bytes 512 and needs 1024"));
  bad = good_dst;
  bad.buffers[5].row_bytes -= 1;
  CHECK_THAT(refusal(good_src, bad), Contains("decode has row_bytes 1023 and needs 1024 (4 heads)"));
  bad.buffers[5].row_bytes = 0;
  CHECK_THAT(refusal(good_src, bad), Contains("row_bytes 0"));
  bad = good_src;
  bad.buffers[0].layer = 20;
  CHECK_THAT(refusal(bad, good_dst),
             Contains("prefill buffer 0 holds layer 20, its PP stage 0 has layers 0 to 15"));
  bad = good_src;
  bad.buffers[0].layer = 1;
  CHECK_THAT(refusal(bad, good_dst), Contains("prefill layer 1 has two buffers of kind key"));
  bad = good_src;
  bad.buffers[0].kind = BufferKind::kLatent;
  CHECK_THAT(refusal(bad, good_dst), Contains("kind latent"));
  bad = good_src;
  bad.page_size = 0;
  CHECK_THAT(refusal(bad, good_dst), Contains("page_size is 0"));
  bad = good_src;
  bad.coord.tp = 2;
  CHECK_THAT(refusal(bad, good_dst), Contains("tp 2") && Contains("outside its topology tp=2,pp=2"));
  bad = good_src;
  bad.buffers.push_back({32, BufferKind::kKey, 1024, 9});
  CHECK_THAT(refusal(bad, good_dst), Contains("layer 32"));
  bad = good_dst;
  bad.buffers.push_back({32, BufferKind::kKey, 7, 9});
  CHECK(refusal(good_src, bad).empty());
}

TEST_CASE("a page that is no multiple of the DCP interleave is refused") {
  const ModelGeometry model = mla();
  const auto layout =
      pair_layout(model, rank(model, "tp=1", {}, 64), rank(model, "tp=2,dcp=2,interleave=48", {}, 64));
  REQUIRE_FALSE(layout);
  CHECK_THAT(layout.error().message, Contains("page_size 64 is not a multiple of its DCP interleave 48"));
}

TEST_CASE("interleaved blocks are single runs over consecutive pages") {
  const ModelGeometry model = mla();
  const PairLayout layout = *pair_layout(model, rank(model, "tp=1", {}, 64),
                                         rank(model, "tp=2,dcp=2,interleave=16", {1, 0, 0, 0}, 64));
  const Pages src = range(0, 4);
  const Pages dst = range(9, 2);
  const Plan plan = plan_chunk(layout, {0, 256, 0, 0, src, dst}).value();
  CHECK(plan.runs == std::vector<RowRun>{{16, 576, 0, 16, 8, 32, 16}});
  // Tokens 20 to 49 of the request: the middle of a block, and the begin of the next.
  const Plan part = plan_chunk(layout, {20, 50, 0, 0, src, dst}).value();
  CHECK(part.runs == std::vector<RowRun>{{20, 580, 4, 12, 1, 12, 12}, {48, 592, 16, 2, 1, 2, 2}});
}

// The third page begins inside a block and is as long as the first, which began with a whole one.
TEST_CASE("source pages that cut interleaved blocks lose and repeat nothing") {
  const ModelGeometry model = mla();
  const PairLayout layout =
      *pair_layout(model, rank(model, "tp=1", {}, 10), rank(model, "tp=2,dcp=2,interleave=3", {}, 9));
  const Pages src{0, 2, 4, 6};
  const Pages dst{0, 1, 2};
  const Plan plan = plan_chunk(layout, {0, 37, 0, 0, src, dst}).value();
  CHECK(plan.runs == std::vector<RowRun>{{0, 0, 0, 3, 2, 6, 3},
                                         {22, 6, 6, 3, 1, 3, 3},
                                         {28, 9, 9, 2, 1, 2, 2},
                                         {40, 11, 11, 1, 1, 1, 1},
                                         {44, 12, 12, 3, 1, 3, 3},
                                         {60, 15, 15, 3, 1, 3, 3},
                                         {66, 18, 18, 1, 1, 1, 1}});
  CHECK(plan.rows == 19);
}

TEST_CASE("N -> 1 is dense at the source and strided at the destination") {
  const ModelGeometry model = mla();
  const PairLayout layout =
      *pair_layout(model, rank(model, "tp=4,dcp=4", {2, 0, 0, 0}, 64), rank(model, "tp=1", {}, 64));
  const Pages src = range(5, 1);
  const Pages dst = range(0, 4);
  const Plan plan = plan_chunk(layout, {0, 256, 0, 0, src, dst}).value();
  CHECK(plan.runs == std::vector<RowRun>{{320, 2, 2, 1, 64, 1, 4}});
}

// Every source holds the whole index row, and the destination takes heads of two of them.
TEST_CASE("index rows beside head-sharded KV come from one source") {
  ModelGeometry model = mha(4);
  model.index_head_dim = 128;
  const RankShape dst = rank(model, "tp=2", {1, 0, 0, 0}, 16);
  std::vector<std::uint32_t> bytes(4);  // of index keys, by source
  for (std::uint32_t tp = 0; tp < 4; ++tp) {
    const PairLayout layout = *pair_layout(model, rank(model, "tp=4", {tp, 0, 0, 0}, 16), dst);
    for (const BufferPair& pair : layout.pairs) {
      bytes[tp] += dst.buffers[pair.dst_buffer].kind == BufferKind::kIndexKey ? pair.bytes : 0;
    }
  }
  CHECK(bytes == std::vector<std::uint32_t>{0, 0, 128 * model.hidden_layers, 0});
}

TEST_CASE("a stage of linear layers only shares state and no token rows") {
  ModelGeometry model = mha(4);
  model.hidden_layers = 4;
  model.kv_layers = {3};
  model.state_layers = {0, 1, 2};
  model.state = {{BufferKind::kConv, 1, {8}, 2}};
  const auto parts = pair_layouts(model, rank(model, "tp=1,pp=2", {0, 0, 0, 0}, 16, 4),
                                  rank(model, "tp=2,pp=2,pp_layers=3+1", {1, 0, 0, 0}, 16, 4))
                         .value();
  REQUIRE(parts.size() == 2);
  CHECK(parts[0].space == RowSpace::kTokens);
  CHECK(parts[0].pairs.empty());
  CHECK(parts[1].space == RowSpace::kState);
  CHECK(parts[1].pairs.size() == 2);
  PartRequest part;
  part.tokens = part.request = {0, 40};
  part.last = true;
  part.src.state_slot = 2;
  part.dst.state_slot = 3;
  CHECK(plan_part(parts[0], part).value().runs.empty());
  const Plan state = plan_part(parts[1], part).value();
  CHECK(state.runs == std::vector<RowRun>{{2, 3, 0, 1, 1, 1, 1}});
  CHECK(state.pairs[0] == BufferPair{0, 0, 16, 8, 8, 0, 8});
}

}  // namespace kvferry
