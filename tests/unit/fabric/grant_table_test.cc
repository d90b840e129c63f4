#include <catch2/catch.hpp>

#include <algorithm>

#include "tests/support/fabric_fixture.h"
#include "transport/grant_table.h"

using namespace kvferry;
using namespace kvferry::test;

namespace {

constexpr PeerId kFirst = 11;
constexpr PeerId kSecond = 12;

/// Decode ranks 0 and 1 with two buffers of 64-byte rows, 10 pages of 4 rows; one aux field. Room 5 may write
/// pages 7, 8, 2 of rank 0, from prefill ranks 0 (first peer) and 1 (second peer).
struct World {
  World() {
    for (RankIndex rank = 0; rank < 2; ++rank) {
      PoolLayout layout;
      layout.rank = rank;
      layout.page_size = 4;
      layout.buffers = {BufferPlace{BufferShape{0, BufferKind::kKey, 64, 10}, 0, 64},
                        BufferPlace{BufferShape{0, BufferKind::kValue, 64, 10}, 0, 4096}};
      layout.aux = {AuxField{"bootstrap_room", 16, 3, 1, 0}};
      pools.push_back(make_pool(layout, kDstGuard));
      table.add_pool(pools.back());
    }
    grant.key = GrantKey{5, 1, 0};
    grant.pages = std::make_shared<const std::vector<std::uint32_t>>(std::vector<std::uint32_t>{7, 8, 2});
    grant.has_aux = true;
    grant.aux_slot = 1;
    grant.sources = {{0, kFirst}, {1, kSecond}};
  }

  BlockHeader rows(std::uint64_t index, std::uint32_t count) const {
    BlockHeader h;
    h.key = TransferKey{grant.key, 0};
    h.target = 1;
    h.dst_index = index;
    h.rows = count;
    h.count = 1;
    h.step = count;
    h.row_bytes = 64;
    h.payload_bytes = std::uint64_t{count} * 64;
    return h;
  }
  BlockHeader aux(std::uint32_t field, std::uint64_t slot, std::uint32_t bytes) const {
    BlockHeader h = rows(slot, 1);
    h.type = BlockType::kAux;
    h.target = field;
    h.row_bytes = bytes;
    h.payload_bytes = bytes;
    return h;
  }
  std::vector<std::span<std::byte>> spans(const BlockHeader& header) {
    auto placement = table.admit(header, kFirst);
    REQUIRE(placement.has_value());
    std::vector<std::span<std::byte>> found;
    for (auto span = placement->next(); !span.empty(); span = placement->next()) {
      found.push_back(span);
    }
    CHECK(placement->bytes_left() == 0);
    return found;
  }
  bool illegal(const BlockHeader& header, PeerId peer = kFirst) {
    const auto result = table.admit(header, peer);
    return !result && !result.error().discard && result.error().error.code == Code::kProtocol;
  }
  bool discarded(const BlockHeader& header, PeerId peer = kFirst) {
    const auto result = table.admit(header, peer);
    return !result && result.error().discard;
  }

  std::vector<std::shared_ptr<Pool>> pools;
  GrantTable table;
  Grant grant;
};

}  // namespace

TEST_CASE("granted rows are translated to their pages and merged across consecutive ones") {
  World world;
  REQUIRE(world.table.open(world.grant).has_value());
  std::byte* base = world.pools[0]->buffer(1).data();
  const auto found = world.spans(world.rows(2, 10));  // rows 2,3 of page 7, all of page 8, all of page 2
  REQUIRE(found.size() == 2);
  CHECK(found[0].data() == base + (7 * 4 + 2) * 64);
  CHECK(found[0].size() == 6 * 64);
  CHECK(found[1].data() == base + 2 * 4 * 64);
  CHECK(found[1].size() == 4 * 64);

  BlockHeader slice = world.rows(3, 2);
  slice.row_offset = 16;
  slice.row_bytes = 32;
  slice.payload_bytes = 64;
  const auto slices = world.spans(slice);
  REQUIRE(slices.size() == 2);
  CHECK(slices[0].data() == base + (7 * 4 + 3) * 64 + 16);
  CHECK(slices[1].data() == base + 8 * 4 * 64 + 16);
  CHECK(slices[1].size() == 32);

  const auto aux = world.spans(world.aux(0, 1, 8));
  REQUIRE(aux.size() == 1);
  CHECK(aux[0].data() == world.pools[0]->aux_row(0, 1).data());
  CHECK(aux[0].size() == 8);
}

TEST_CASE("a block outside its grant is illegal, whatever numbers it names (BL-37)") {
  World world;
  REQUIRE(world.table.open(world.grant).has_value());
  const auto with = [&world](auto change) {
    BlockHeader h = world.rows(0, 4);
    change(h);
    return world.illegal(h);
  };
  CHECK(with([](auto& h) { h.dst_index = 9; }));
  CHECK(with([](auto& h) { h.dst_index = 12; }));
  CHECK(with([](auto& h) { h.dst_index = std::uint64_t{1} << 60; }));
  CHECK(with([](auto& h) { h.dst_index = std::uint64_t{1} << 32; }));
  CHECK(with([](auto& h) {
    h.count = 2;
    h.step = 9;
    h.payload_bytes *= 2;
  }));
  CHECK(with([](auto& h) { h.target = 2; }));
  CHECK(with([](auto& h) { h.target = ~std::uint32_t{0}; }));
  CHECK(with([](auto& h) { h.row_offset = 1; }));
  CHECK(with([](auto& h) { h.row_offset = ~std::uint32_t{0}; }));
  CHECK(with([](auto& h) {
    h.row_bytes = 65;
    h.payload_bytes = 4 * 65;
  }));
  CHECK(with([](auto& h) { h.key.prefill_rank = 2; }));
  CHECK(world.illegal(world.rows(0, 4), kSecond));
  CHECK(world.illegal(world.rows(0, 4), 0));
  CHECK(world.illegal(world.aux(0, 0, 8)));
  CHECK(world.illegal(world.aux(0, 2, 8)));
  CHECK(world.illegal(world.aux(1, 1, 8)));
  CHECK(world.illegal(world.aux(0, 1, 17)));
  CHECK_FALSE(world.illegal(world.rows(8, 4)));
}

TEST_CASE("aux is illegal where none was granted") {
  World world;
  world.grant.has_aux = false;
  REQUIRE(world.table.open(world.grant).has_value());
  CHECK(world.illegal(world.aux(0, 1, 8)));
}

TEST_CASE("a block of an unknown, closed or detached grant is discarded") {
  World world;
  CHECK(world.discarded(world.rows(0, 4)));
  REQUIRE(world.table.open(world.grant).has_value());
  for (auto change :
       {+[](BlockHeader& h) { h.key.grant.generation = 2; }, +[](BlockHeader& h) { h.key.grant.room = 6; },
        +[](BlockHeader& h) { h.key.grant.decode_rank = 1; }}) {
    BlockHeader h = world.rows(0, 4);
    change(h);
    CHECK(world.discarded(h));
  }
  SECTION("closed") {
    CHECK(world.table.close(world.grant.key));
    CHECK_FALSE(world.table.close(world.grant.key));
  }
  SECTION("pool removed") {
    world.table.remove_pool(0);
  }
  SECTION("pool replaced") {
    PoolLayout layout = world.pools[0]->layout();
    world.table.add_pool(make_pool(layout, kDstGuard));
  }
  CHECK(world.discarded(world.rows(0, 4)));
  CHECK_FALSE(world.table.notice(make_notice(world.rows(0, 1).key, 0, 0), kFirst).has_value());
}

TEST_CASE("landed comes once, in any order of blocks and notice") {
  // All orders of two blocks and the notice; the count completes with whichever comes last.
  std::vector<int> order{0, 1, 2};
  do {
    World world;
    REQUIRE(world.table.open(world.grant).has_value());
    const BlockHeader blocks[] = {world.rows(0, 4), world.rows(4, 8)};
    int landed = 0;
    for (std::size_t i = 0; i < order.size(); ++i) {
      Admission<std::optional<fabric_event::Landed>> result;
      if (order[i] == 2) {
        result = world.table.notice(make_notice(blocks[0].key, 12 * 64, 2), kFirst);
      } else {
        REQUIRE(world.table.admit(blocks[order[i]], kFirst).has_value());
        result = world.table.arrived(blocks[order[i]], kFirst);
      }
      REQUIRE(result.has_value());
      if (result->has_value()) {
        ++landed;
        CHECK(i == 2);
        CHECK((*result)->bytes == 12 * 64);
        CHECK((*result)->key == blocks[0].key);
        CHECK((*result)->peer == kFirst);
      }
    }
    CHECK(landed == 1);
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST_CASE("a block that is under way is not counted as landed") {
  World world;
  REQUIRE(world.table.open(world.grant).has_value());
  const BlockHeader block = world.rows(0, 4);
  REQUIRE(world.table.admit(block, kFirst).has_value());
  const auto early = world.table.notice(make_notice(block.key, 256, 1), kFirst);
  REQUIRE(early.has_value());
  CHECK_FALSE(early->has_value());
  const auto done = world.table.arrived(block, kFirst);
  REQUIRE(done.has_value());
  CHECK(done->has_value());
}

TEST_CASE("sources of one grant land separately") {
  World world;
  REQUIRE(world.table.open(world.grant).has_value());
  TransferKey first{world.grant.key, 0};
  TransferKey second{world.grant.key, 1};
  const auto a = world.table.notice(make_notice(second, 0, 0), kSecond);
  REQUIRE(a.has_value());
  REQUIRE(a->has_value());
  CHECK((*a)->key == second);
  const auto b = world.table.notice(make_notice(first, 0, 0), kFirst);
  REQUIRE(b.has_value());
  REQUIRE(b->has_value());
  CHECK((*b)->bytes == 0);
}

TEST_CASE("more than announced is illegal, before and after the notice") {
  World world;
  REQUIRE(world.table.open(world.grant).has_value());
  const BlockHeader block = world.rows(0, 4);
  const auto notice = [&](std::uint64_t bytes, std::uint64_t blocks) {
    return world.table.notice(make_notice(block.key, bytes, blocks), kFirst);
  };
  SECTION("notice below what was sent") {
    REQUIRE(world.table.admit(block, kFirst).has_value());
    CHECK_FALSE(notice(255, 1).has_value());
    CHECK_FALSE(notice(256, 0).has_value());
    CHECK(notice(256, 1).has_value());
  }
  SECTION("block above the notice") {
    REQUIRE(notice(300, 5).has_value());
    REQUIRE(world.table.admit(block, kFirst).has_value());
    CHECK(world.illegal(world.rows(4, 1)));
  }
  SECTION("block count above the notice") {
    REQUIRE(notice(1024, 1).has_value());
    REQUIRE(world.table.admit(block, kFirst).has_value());
    CHECK(world.illegal(world.rows(4, 1)));
  }
  SECTION("second notice") {
    REQUIRE(notice(256, 1).has_value());
    CHECK_FALSE(notice(256, 1).has_value());
  }
  SECTION("block after landing") {
    REQUIRE(notice(0, 0).has_value());
    CHECK(world.illegal(block));
  }
}

TEST_CASE("a grant outside its pool is refused") {
  World world;
  const auto refused = [&world](Code code) {
    const auto result = world.table.open(world.grant);
    return !result && result.error().code == code;
  };
  SECTION("page") {
    world.grant.pages = std::make_shared<const std::vector<std::uint32_t>>(std::vector<std::uint32_t>{0, 10});
    CHECK(refused(Code::kInvalid));
  }
  SECTION("aux slot") {
    world.grant.aux_slot = 3;
    CHECK(refused(Code::kInvalid));
  }
  SECTION("no page list") {
    world.grant.pages = nullptr;
    CHECK(refused(Code::kInvalid));
  }
  SECTION("source twice") {
    world.grant.sources.emplace_back(0, kSecond);
    CHECK(refused(Code::kInvalid));
  }
  SECTION("rank without a pool") {
    world.grant.key.decode_rank = 2;
    CHECK(refused(Code::kNotFound));
  }
  SECTION("key that is open") {
    REQUIRE(world.table.open(world.grant).has_value());
    CHECK(refused(Code::kConflict));
  }
}
