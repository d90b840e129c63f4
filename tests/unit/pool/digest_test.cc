// Digests of the same KV in different layouts are the same, and of anything else they are not.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#include <catch2/catch.hpp>
#include <cstdio>
#include <cstring>
#include <numeric>

#include "common/topology/rank_map.h"
#include "common/verify/digest.h"
#include "tests/support/rng.h"

using namespace kvferry;
using namespace kvferry::test;

namespace {

constexpr std::uint64_t kTokens = 37;

/// A model with every kind of buffer that one attention kind can have.
ModelGeometry model_of(bool mla) {
  ModelGeometry model;
  model.name = "test";
  model.dtype = Dtype::kInt8;
  model.hidden_layers = 5;
  model.kv_layers = {0, 2};
  model.sliding_layers = {1};
  model.sliding_window = 9;
  model.state_layers = {3, 4};
  model.state = {StateTensor{BufferKind::kConv, 2, {8, 4}, 3},
                 StateTensor{BufferKind::kRecurrent, 1, {8}, 5}};
  model.draft_layers = 1;
  if (mla) {
    model.attention = AttentionKind::kMla;
    model.kv_heads = 1;
    model.latent_dim = 6;
    model.rope_dim = 2;
    model.index_head_dim = 4;
  } else {
    model.kv_heads = 4;
    model.head_dim = 3;
    model.v_head_dim = 5;
  }
  return model;
}

std::byte content(std::uint32_t layer, BufferKind kind, std::uint64_t byte, std::uint64_t token) {
  return static_cast<std::byte>(
      (layer * 7919 + static_cast<std::uint64_t>(kind) * 104'729 + token * 611'953 + byte + 1) *
          0x9E3779B97F4A7C15ull >>
      56);
}

/// One rank with one request in it: window pages and a state slot of its own.
struct Rank {
  Topology topology;
  RankCoord coord;
  std::shared_ptr<Pool> pool;
  std::shared_ptr<const std::vector<std::uint32_t>> pages;
  std::shared_ptr<const std::vector<std::uint32_t>> window_pages;
  std::uint32_t state_slot = 1;
};

std::span<std::byte> row_of(const Rank& rank, std::uint32_t buffer, const std::vector<std::uint32_t>& pages,
                            std::uint64_t local) {
  const BufferShape& shape = rank.pool->layout().buffers[buffer].shape;
  const std::uint64_t page_rows = shape.rows_of_page(rank.pool->page_size());
  const std::uint64_t row = pages[local / page_rows] * page_rows + local % page_rows;
  return rank.pool->buffer(buffer).subspan(row * shape.row_bytes, shape.row_bytes);
}

void fill(const ModelGeometry& model, Rank& rank) {
  for (std::uint32_t b = 0; b < rank.pool->buffer_count(); ++b) {
    const BufferPlace& place = rank.pool->layout().buffers[b];
    const BufferShape& shape = place.shape;
    const std::uint32_t heads = model.attention == AttentionKind::kMla ? 1 : model.kv_heads;
    const std::uint32_t groups = rank.topology.tp / rank.topology.dcp;
    const std::uint64_t group = rank.coord.tp / rank.topology.dcp;
    const std::uint64_t first_head = groups > heads ? group * heads / groups : group * (heads / groups);
    const bool per_head = shape.kind == BufferKind::kKey || shape.kind == BufferKind::kValue;
    const std::uint64_t base = per_head ? first_head * model.head_bytes(shape.kind) : 0;
    if (place.space == RowSpace::kState) {
      const StateTensor& tensor = *model.state_tensor(shape.kind);
      const auto row = row_of(rank, b, {rank.state_slot}, 0);
      std::size_t at = 0;
      std::uint64_t before = 0;
      for (std::uint32_t outer = 0; outer < tensor.outer; ++outer) {
        for (const std::uint32_t block : tensor.blocks) {
          const std::uint64_t each = block / rank.topology.tp;
          for (std::uint64_t i = 0; i < each * tensor.element_bytes; ++i) {
            row[at++] = content(shape.layer, shape.kind,
                                (before + rank.coord.tp * each) * tensor.element_bytes + i, 0);
          }
          before += block;
        }
      }
      continue;
    }
    const auto& pages = place.space == RowSpace::kWindow ? *rank.window_pages : *rank.pages;
    std::uint64_t local = 0;
    for (std::uint64_t token = 0; token < kTokens; ++token) {
      if (place.space != RowSpace::kDraft &&
          token / rank.topology.dcp_interleave % rank.topology.dcp != rank.coord.tp % rank.topology.dcp) {
        continue;
      }
      const auto row = row_of(rank, b, pages, local++);
      for (std::size_t i = 0; i < row.size(); ++i) {
        row[i] = content(shape.layer, shape.kind, base + i, token);
      }
    }
  }
}

Rank make_rank(Rng& rng, const ModelGeometry& model, const Topology& topology, const RankCoord& coord,
               std::uint32_t page_size) {
  Rank rank{topology, coord, nullptr, nullptr, nullptr, 1};
  const std::uint64_t virtual_page = std::uint64_t{page_size} * topology.dcp;
  const std::uint64_t count = (kTokens + virtual_page - 1) / virtual_page;
  PoolLayout layout;
  layout.page_size = page_size;
  std::uint64_t bytes = 0;
  for (const BufferShape& shape :
       rank_buffers(model, topology, coord, count + 2, rows_of_page(RowSpace::kDraft, page_size, topology))) {
    layout.buffers.push_back(BufferPlace{shape, 0, bytes});
    bytes += shape.pages * shape.rows_of_page(page_size) * shape.row_bytes;
  }
  set_spaces(model, layout);
  UniqueFd fd(::memfd_create("digest", MFD_ALLOW_SEALING));
  REQUIRE(::ftruncate(fd.get(), static_cast<off_t>(bytes + 1)) == 0);
  REQUIRE(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK) == 0);
  std::vector<UniqueFd> fds;
  fds.push_back(std::move(fd));
  auto pool = Pool::map(std::move(layout), std::move(fds));
  REQUIRE(pool.has_value());
  rank.pool = *pool;
  const auto pages = [&] {
    std::vector<std::uint32_t> out(count + 2);
    std::iota(out.begin(), out.end(), 0u);
    rng.shuffle(out);
    out.resize(count);
    return std::make_shared<const std::vector<std::uint32_t>>(std::move(out));
  };
  rank.pages = pages();
  rank.window_pages = pages();
  fill(model, rank);
  return rank;
}

DigestTask task_of(const std::shared_ptr<const ModelGeometry>& model, const Rank& rank, VerifyRate rate) {
  DigestTask task;
  task.room = 77;
  task.rate = rate;
  task.grid = {{0, kTokens}, 8};
  task.model = model;
  task.pool = rank.pool;
  task.topology = rank.topology;
  task.coord = rank.coord;
  task.pages = rank.pages;
  task.window_pages = rank.window_pages;
  task.rows = {*rank.pages, 0, *rank.window_pages, 0, rank.state_slot};
  task.tokens = {0, kTokens};
  task.window = {kTokens - model->sliding_window, kTokens};
  task.state = true;
  return task;
}

/// What all elected prefill ranks together say of one decode rank's KV.
Digest sent_to(const std::shared_ptr<const ModelGeometry>& model, const std::vector<Rank>& prefill,
               const Rank& decode, VerifyRate rate) {
  Digest sum{{}, task_of(model, decode, rate).grid.columns(), {}};
  for (const Rank& rank : prefill) {
    const RankShape src{rank.topology, rank.coord, rank.pool->page_size(), shapes(rank.pool->layout())};
    const RankShape dst{decode.topology, decode.coord, decode.pool->page_size(),
                        shapes(decode.pool->layout())};
    const auto layouts = pair_layouts(*model, src, dst);
    REQUIRE(layouts.has_value());
    DigestTask task = task_of(model, rank, rate);
    DigestTask::Peer peer{decode.topology, decode.coord, {0, kTokens}, {}};
    for (const PairLayout& layout : *layouts) {
      for (const BufferPair& pair : layout.pairs) {
        if (layout.elected(task.room)) {
          peer.buffers.push_back(pair.src_buffer);
        }
      }
    }
    std::sort(peer.buffers.begin(), peer.buffers.end());
    peer.buffers.erase(std::unique(peer.buffers.begin(), peer.buffers.end()), peer.buffers.end());
    task.peer = std::move(peer);
    add_digest(sum, compute_digest(task));
  }
  return sum;
}

Topology random_topology(Rng& rng, bool prefill) {
  Topology topology;
  topology.tp = 1u << rng.below(3);
  topology.dcp = rng.chance(1, 2) ? 1u << rng.below(2) : 1;
  topology.tp = std::max(topology.tp, topology.dcp);
  topology.dcp_interleave = rng.chance(1, 2) ? 1 : 2;
  topology.pp = rng.between32(1, 2);
  if (prefill && rng.chance(1, 3)) {
    topology.cp = 2;
    topology.cp_split = static_cast<CpSplit>(rng.below(3));
  }
  return topology;
}

}  // namespace

TEST_CASE("what the sources meant to send is what lies in the pool, in every pair of layouts") {
  const std::uint64_t seed = test_seed(20261201);
  std::printf("digest test: KVF_SEED=%llu\n", static_cast<unsigned long long>(seed));
  int compared = 0;
  for (std::uint64_t i = 0; i < 300; ++i) {
    Rng rng(seed + i);
    const auto model = std::make_shared<const ModelGeometry>(model_of(rng.chance(1, 2)));
    const Topology from = random_topology(rng, true);
    const Topology into = random_topology(rng, false);
    if (!validate_pair(*model, from, into)) {
      continue;
    }
    const std::uint32_t from_page = 2 * rng.between32(1, 3);
    const std::uint32_t into_page = 2 * rng.between32(1, 3);
    std::vector<Rank> prefill;
    for (RankIndex rank = 0; rank < from.rank_count(); ++rank) {
      prefill.push_back(make_rank(rng, *model, from, from.coord(rank), from_page));
    }
    const Rank decode = make_rank(
        rng, *model, into, into.coord(static_cast<RankIndex>(rng.below(into.rank_count()))), into_page);
    const VerifyRate rate = rng.chance(1, 2) ? kVerifyFull : 3;
    const Digest sent = sent_to(model, prefill, decode, rate);
    DigestTask task = task_of(model, decode, rate);
    const Digest lies = compute_digest(task);
    INFO("seed " << seed + i << ": " << to_string(from) << " -> " << to_string(into) << ", "
                 << to_string(model->attention));
    const auto mismatch = compare_digests(sent, lies, task.grid, model->hidden_layers);
    if (mismatch) {
      FAIL("layer " << mismatch->layer << " tokens " << mismatch->tokens.begin << " missing "
                    << mismatch->missing);
    }
    ++compared;
  }
  CHECK(compared > 150);
}

TEST_CASE(
    "a changed byte, two exchanged rows and a row of another layer are found, and their place is named") {
  Rng rng(test_seed(7));
  const auto model = std::make_shared<const ModelGeometry>(model_of(false));
  const std::vector<Rank> prefill{make_rank(rng, *model, Topology{}, {}, 4)};
  Topology two;
  two.tp = 2;
  const Rank decode = make_rank(rng, *model, two, {1, 0, 0, 0}, 6);
  const Digest sent = sent_to(model, prefill, decode, kVerifyFull);
  DigestTask task = task_of(model, decode, kVerifyFull);
  const auto found = [&] {
    return compare_digests(sent, compute_digest(task), task.grid, model->hidden_layers);
  };
  REQUIRE_FALSE(found());
  for (std::uint32_t b = 0; b < decode.pool->buffer_count(); ++b) {
    const BufferPlace& place = decode.pool->layout().buffers[b];
    if (place.space == RowSpace::kState) {
      const auto row = row_of(decode, b, {decode.state_slot}, 0);
      row.back() ^= std::byte{1};
      const auto mismatch = found();
      REQUIRE(mismatch);
      CHECK(mismatch->layer == place.shape.layer);
      row.back() ^= std::byte{1};
      continue;
    }
    const bool window = place.space == RowSpace::kWindow;
    const auto& pages = window ? *decode.window_pages : *decode.pages;
    const auto a = row_of(decode, b, pages, 30);
    const auto other = row_of(decode, b, pages, 31);
    a[0] ^= std::byte{0x80};
    auto mismatch = found();
    REQUIRE(mismatch);
    CHECK(mismatch->layer == place.shape.layer);
    CHECK(mismatch->tokens.contains(30));
    a[0] ^= std::byte{0x80};
    std::swap_ranges(a.begin(), a.end(), other.begin());
    mismatch = found();
    REQUIRE(mismatch);
    CHECK(mismatch->tokens == Interval{24, 32});
    std::swap_ranges(a.begin(), a.end(), other.begin());
    if (window) {  // before the window nothing is looked at
      row_of(decode, b, pages, 3)[0] ^= std::byte{1};
    }
    REQUIRE_FALSE(found());
  }
}

TEST_CASE("sampling compares about one cell in n, the same ones on both sides, and others for other rooms") {
  std::uint64_t selected = 0;
  std::uint64_t same = 0;
  for (std::uint32_t layer = 0; layer < 61; ++layer) {
    for (std::uint64_t column = 0; column < 1000; ++column) {
      selected += digest_selected(5, layer, column, 16);
      same += digest_selected(5, layer, column, 16) && digest_selected(6, layer, column, 16);
      CHECK(digest_selected(5, layer, column, kVerifyFull));
      CHECK_FALSE(digest_selected(5, layer, column, kVerifyOff));
    }
  }
  CHECK(selected > 61'000 / 16 * 9 / 10);
  CHECK(selected < 61'000 / 16 * 11 / 10);
  CHECK(same < selected / 8);
  CHECK(digest_range({0, 100}) == 64);
  CHECK(digest_range({0, 131'072}) == 128);
  CHECK((DigestGrid{{0, 1'000'000}, digest_range({0, 1'000'000})}.columns()) <= 1024);
}
