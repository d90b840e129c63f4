#include <catch2/catch.hpp>

#include <cstring>
#include <vector>

#include "kernels/copy.h"
#include "tests/support/rng.h"

using namespace kvferry;
using namespace kvferry::test;

TEST_CASE("every copy variant equals memcpy on any stride and alignment") {
  const auto seed = test_seed(0x10C4);
  INFO("seed " << seed);
  Rng random(seed);
  std::vector<std::byte> source(1 << 17);
  for (std::byte& byte : source) {
    byte = static_cast<std::byte>(random.next());
  }
  for (int round = 0; round < 600; ++round) {
    const std::size_t piece = random.below(4) == 0 ? random.between(1, 5000) : random.between(1, 700);
    const std::size_t count = random.between(0, 12);
    const std::size_t dst_stride = piece + (random.below(2) == 0 ? 0 : random.below(300));
    const std::size_t src_stride = random.below(3) == 0 ? piece : random.below(6000);
    const std::size_t dst_at = random.below(130);
    const std::size_t src_at = random.below(130);
    std::vector<std::byte> expected(200 + 12 * (5000 + 300), std::byte{0xA5});
    for (std::size_t k = 0; k < count; ++k) {
      std::memcpy(expected.data() + dst_at + k * dst_stride, source.data() + src_at + k * src_stride, piece);
    }
    for (const CopyVariant variant : copy_variants()) {
      INFO("round " << round << " variant " << to_string(variant) << " piece " << piece << " count "
                    << count);
      std::vector<std::byte> found(expected.size(), std::byte{0xA5});
      copy_run_with(variant, found.data() + dst_at, source.data() + src_at, piece, count, dst_stride,
                    src_stride);
      copy_fence();
      REQUIRE(found == expected);
    }
    std::vector<std::byte> found(expected.size(), std::byte{0xA5});
    copy_run(found.data() + dst_at, source.data() + src_at, piece, count, dst_stride, src_stride);
    copy_fence();
    REQUIRE(found == expected);
  }
}

TEST_CASE("gathering pieces of any number and size equals one memcpy after the other") {
  const auto seed = test_seed(0x6A7E);
  INFO("seed " << seed);
  Rng random(seed);
  std::vector<std::byte> source(1 << 17);
  for (std::byte& byte : source) {
    byte = static_cast<std::byte>(random.next());
  }
  for (int round = 0; round < 400; ++round) {
    std::vector<std::span<const std::byte>> pieces(random.between(0, 40));
    std::vector<std::byte> expected;
    for (auto& piece : pieces) {
      const std::size_t bytes = random.below(8) == 0 ? random.below(20000) : random.below(1500);
      piece = std::span(source).subspan(random.below(source.size() - bytes), bytes);
      expected.insert(expected.end(), piece.begin(), piece.end());
    }
    expected.resize(expected.size() + 64, std::byte{0xA5});  // nothing is written beyond
    std::vector<std::byte> found(expected.size(), std::byte{0xA5});
    copy_gather(found.data(), pieces);
    REQUIRE(found == expected);
  }
}
