#include <catch2/catch.hpp>

#include "tests/support/rng.h"

#include "transport/block.h"

using namespace kvferry;

namespace {

BlockHeader rows_header() {
  BlockHeader h;
  h.key.grant.room = 5;
  h.key.grant.generation = 9;
  h.key.grant.decode_rank = 3;
  h.key.prefill_rank = 2;
  h.target = 1;
  h.row_offset = 16;
  h.dst_index = 100;
  h.rows = 4;
  h.count = 3;
  h.step = 8;
  h.row_bytes = 64;
  h.payload_bytes = 4 * 3 * 64;
  return h;
}

Result<BlockHeader> round_trip(const BlockHeader& header) {
  BlockBytes bytes;
  encode_block(header, bytes);
  return decode_block(bytes);
}

bool refused(const BlockHeader& header) {
  const auto decoded = round_trip(header);
  return !decoded && decoded.error().code == Code::kProtocol && !decoded.error().message.empty();
}

}  // namespace

TEST_CASE("a block header survives its wire form") {
  for (const BlockHeader& header : {rows_header(), make_notice(rows_header().key, 1ull << 40, 12345),
                                    make_drain(rows_header().key), make_notice(rows_header().key, 0, 0)}) {
    const auto decoded = round_trip(header);
    REQUIRE(decoded.has_value());
    CHECK(*decoded == header);
  }
  CHECK(end_index(rows_header()) == 100 + 2 * 8 + 4);
}

TEST_CASE("the wire form is little-endian and fixed") {
  BlockBytes bytes;
  encode_block(rows_header(), bytes);
  CHECK(bytes[0] == std::byte{'K'});
  CHECK(bytes[3] == std::byte{'1'});
  CHECK(bytes[4] == std::byte{1});
  CHECK(bytes[8] == std::byte{5});
  CHECK(bytes[40] == std::byte{100});
  CHECK(bytes[64] == std::byte{0});
  CHECK(bytes[65] == std::byte{3});
}

TEST_CASE("an inconsistent block header is refused") {
  const auto with = [](auto change) {
    BlockHeader h = rows_header();
    change(h);
    return refused(h);
  };
  CHECK(with([](auto& h) {
    h.rows = 0;
    h.payload_bytes = 0;
  }));
  CHECK(with([](auto& h) {
    h.count = 0;
    h.payload_bytes = 0;
  }));
  CHECK(with([](auto& h) {
    h.row_bytes = 0;
    h.payload_bytes = 0;
  }));
  CHECK(with([](auto& h) { h.payload_bytes += 1; }));
  CHECK(with([](auto& h) { h.payload_bytes = std::uint64_t{1} << 63; }));
  CHECK(with([](auto& h) { h.step = 3; }));
  CHECK(with([](auto& h) { h.dst_index = ~std::uint64_t{0} - 7; }));
  CHECK(with([](auto& h) { h.key.grant.room = 0; }));
  CHECK(with([](auto& h) { h.key.grant.room = kRoomMax + 1; }));
  CHECK(with([](auto& h) { h.total_bytes = 1; }));
  CHECK(with([](auto& h) { h.type = static_cast<BlockType>(0); }));
  CHECK(with([](auto& h) { h.type = static_cast<BlockType>(6); }));
  CHECK(with([](auto& h) { h.type = BlockType::kAux; }));
  CHECK(with([](auto& h) { h.type = BlockType::kNotice; }));
  CHECK(with([](auto& h) { h.type = BlockType::kDrain; }));
  // 2^32-1 rows in 2^32-1 pieces of 2^32-1 bytes: the product wraps 64 bits to a small number.
  CHECK(with([](auto& h) {
    h.rows = h.count = h.step = h.row_bytes = ~std::uint32_t{0};
    h.payload_bytes = std::uint64_t{h.rows} * h.count * h.row_bytes;
  }));
}

TEST_CASE("a truncated block header is refused") {
  BlockBytes bytes;
  encode_block(rows_header(), bytes);
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    CHECK_FALSE(decode_block(std::span(bytes).first(size)).has_value());
  }
}

TEST_CASE("random bytes are refused or mean exactly themselves") {
  const auto seed = test::test_seed(0x10C4);
  INFO("seed " << seed);
  test::Rng random(seed);
  int accepted = 0;
  for (int i = 0; i < 20000; ++i) {
    BlockBytes bytes;
    encode_block(rows_header(), bytes);
    const int flips = 1 + static_cast<int>(random.below(3));
    for (int k = 0; k < flips; ++k) {
      bytes[random.below(bytes.size())] = static_cast<std::byte>(random.next());
    }
    const auto decoded = decode_block(bytes);
    if (decoded) {
      ++accepted;
      BlockBytes again;
      encode_block(*decoded, again);
      REQUIRE(again == bytes);
    }
  }
  CHECK(accepted > 0);
}
