#include <catch2/catch.hpp>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <limits>

#include "common/pool/hybrid_rows.h"
#include "common/pool/pool.h"

using namespace kvferry;

namespace {

constexpr std::uint64_t kBytes = 1 << 16;

UniqueFd memfd(std::uint64_t bytes, int seals = F_SEAL_SHRINK) {
  UniqueFd fd(::memfd_create("kvferry-test-pool", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  REQUIRE(fd);
  REQUIRE(::ftruncate(fd.get(), static_cast<off_t>(bytes)) == 0);
  if (seals != 0) {
    REQUIRE(::fcntl(fd.get(), F_ADD_SEALS, seals) == 0);
  }
  return fd;
}

std::vector<UniqueFd> list(UniqueFd fd) {
  std::vector<UniqueFd> fds;
  fds.push_back(std::move(fd));
  return fds;
}

/// Two buffers of 8 pages x 16 rows x 64 B, and one aux field, in kBytes.
PoolLayout good() {
  PoolLayout layout;
  layout.rank = 3;
  layout.page_size = 16;
  layout.buffers = {BufferPlace{BufferShape{0, BufferKind::kKey, 64, 8}, 0, 1},
                    BufferPlace{BufferShape{0, BufferKind::kValue, 64, 7}, 0, 8193}};
  layout.aux = {AuxField{"bootstrap_room", 8, 4, 0, 40000}};
  return layout;
}

Error refusal(const PoolLayout& layout, std::vector<UniqueFd> fds) {
  const auto pool = Pool::map(layout, std::move(fds));
  REQUIRE_FALSE(pool.has_value());
  CHECK(pool.error().code == Code::kInvalid);
  CHECK(pool.error().message.find("rank 3") != std::string::npos);
  return pool.error();
}

bool says(const Error& error, const char* text) {
  INFO(error.message);
  return error.message.find(text) != std::string::npos;
}

}  // namespace

TEST_CASE("a mapped pool is the descriptor's memory") {
  UniqueFd fd = memfd(kBytes);
  const int raw = fd.get();
  const auto pool = Pool::map(good(), list(std::move(fd)));
  REQUIRE(pool.has_value());
  CHECK((*pool)->buffer_count() == 2);
  CHECK((*pool)->buffer(0).size() == 8 * 16 * 64);
  CHECK((*pool)->buffer(1).size() == 7 * 16 * 64);
  CHECK((*pool)->mapped_bytes() == kBytes);
  CHECK((*pool)->rank() == 3);
  CHECK(page_count((*pool)->layout()) == 7);
  CHECK(shapes((*pool)->layout()).size() == 2);
  CHECK((*pool)->fds().size() == 1);
  (*pool)->buffer(1)[5] = std::byte{0x77};
  (*pool)->aux_row(0, 3)[7] = std::byte{0x66};
  unsigned char byte = 0;
  REQUIRE(::pread(raw, &byte, 1, 8193 + 5) == 1);
  CHECK(byte == 0x77);
  REQUIRE(::pread(raw, &byte, 1, 40000 + 3 * 8 + 7) == 1);
  CHECK(byte == 0x66);
}

TEST_CASE("memory that could shrink under the daemon is refused") {
  CHECK(says(refusal(good(), list(memfd(kBytes, 0))), "F_SEAL_SHRINK"));
  CHECK(says(refusal(good(), list(memfd(kBytes, F_SEAL_GROW))), "F_SEAL_SHRINK"));
  CHECK(says(refusal(good(), list(memfd(kBytes, F_SEAL_SHRINK | F_SEAL_WRITE))), "sealed against writing"));
  std::FILE* file = std::tmpfile();
  REQUIRE(file != nullptr);
  REQUIRE(::ftruncate(::fileno(file), kBytes) == 0);
  CHECK(says(refusal(good(), list(UniqueFd(::dup(::fileno(file))))), "memfd"));
  std::fclose(file);
  int ends[2] = {-1, -1};
  REQUIRE(::pipe(ends) == 0);
  const UniqueFd other(ends[1]);
  CHECK(says(refusal(good(), list(UniqueFd(ends[0]))), "memfd"));
}

TEST_CASE("a descriptor that is closed or missing is refused") {
  const auto closed = Pool::map(good(), list(UniqueFd()));
  REQUIRE_FALSE(closed.has_value());
  CHECK(closed.error().code == Code::kIo);
  CHECK(says(refusal(good(), {}), "descriptor 0"));
  PoolLayout layout = good();
  layout.aux[0].fd = 1;
  CHECK(says(refusal(layout, list(memfd(kBytes))), "bootstrap_room"));
}

TEST_CASE("buffers outside their descriptor are refused, also where the sum wraps") {
  const auto with = [](auto change, const char* text) {
    PoolLayout layout = good();
    change(layout);
    return says(refusal(layout, list(memfd(kBytes))), text);
  };
  constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();
  CHECK(with([](auto& l) { l.buffers[1].offset = kBytes - 7 * 1024 + 1; }, "buffer 1"));
  CHECK(with([](auto& l) { l.buffers[0].offset = kMax - 100; }, "wraps around"));
  CHECK(with([](auto& l) { l.buffers[0].shape.pages = std::uint64_t{1} << 60; }, "63 bits"));
  CHECK(with([](auto& l) { l.buffers[0].shape.pages = kMax / 1024 + 2; }, "63 bits"));
  CHECK(with([](auto& l) { l.buffers[0].shape.pages = 65; }, "has 65536 bytes"));
  CHECK(with([](auto& l) { l.buffers[0].fd = 7; }, "descriptor 7"));
  CHECK(with([](auto& l) { l.aux[0].offset = kBytes - 31; }, "bootstrap_room"));
  CHECK(with([](auto& l) { l.aux[0].offset = kMax; }, "wraps around"));
}

TEST_CASE("empty shapes are refused") {
  const auto with = [](auto change) {
    PoolLayout layout = good();
    change(layout);
    (void)refusal(layout, list(memfd(kBytes)));
  };
  with([](auto& l) { l.buffers[0].shape.pages = 0; });
  with([](auto& l) { l.buffers[0].shape.row_bytes = 0; });
  with([](auto& l) { l.page_size = 0; });
  with([](auto& l) { l.buffers.clear(); });
  with([](auto& l) { l.aux[0].width = 0; });
  with([](auto& l) { l.aux[0].slots = 0; });
  PoolLayout layout = good();
  (void)refusal(layout, list(memfd(0)));
}

TEST_CASE("a layout that ends exactly at its descriptor's end is mapped") {
  PoolLayout layout = good();
  layout.buffers[1].offset = kBytes - 7 * 1024;
  layout.aux.clear();
  CHECK(Pool::map(layout, list(memfd(kBytes))).has_value());
}

TEST_CASE("index keys and scales lie in one another's gaps, each row where its pitch says") {
  PoolLayout layout = good();
  layout.aux.clear();
  // 7 pages of 16 keys and 16 scales, padded to 17 keys.
  layout.buffers = {BufferPlace{BufferShape{0, BufferKind::kIndexKey, 128, 7, 16, 17}, 0, 0},
                    BufferPlace{BufferShape{0, BufferKind::kIndexScale, 4, 7, 16, 544}, 0, 2048}};
  UniqueFd fd = memfd(7 * 2176);
  const int raw = fd.get();
  const auto pool = Pool::map(layout, list(std::move(fd)));
  REQUIRE(pool.has_value());
  CHECK((*pool)->buffer(0).size() == 6 * 2176 + 2048);
  CHECK((*pool)->buffer(1).size() == 6 * 2176 + 64);
  (*pool)->buffer(0)[(3 * 17 + 15) * 128] = std::byte{0x11};  // the last key of page 3
  (*pool)->buffer(1)[(3 * 544 + 0) * 4] = std::byte{0x22};    // its first scale
  unsigned char bytes[2] = {0, 0};
  REQUIRE(::pread(raw, &bytes[0], 1, 3 * 2176 + 15 * 128) == 1);
  REQUIRE(::pread(raw, &bytes[1], 1, 3 * 2176 + 2048) == 1);
  CHECK(bytes[0] == 0x11);
  CHECK(bytes[1] == 0x22);
  // The last page's scales need the bytes behind its keys.
  CHECK(says(refusal(layout, list(memfd(7 * 2176 - 128 + 63))), "buffer 1"));
}

TEST_CASE("a pool names pages only of what its buffers hold") {
  PoolLayout layout = good();
  layout.buffers = {BufferPlace{BufferShape{0, BufferKind::kConv, 96, 5, 1}, 0, 0, RowSpace::kState}};
  const auto pool = Pool::map(layout, list(memfd(kBytes)));
  REQUIRE(pool.has_value());
  CHECK(page_count((*pool)->layout()) == 0);
  CHECK(page_count((*pool)->layout(), RowSpace::kState) == 5);
  CHECK(check_page_list(**pool, 16, 7, {0, 100}, 0).has_value());
  const auto given = check_page_list(**pool, 16, 7, {0, 100}, 7);
  REQUIRE_FALSE(given.has_value());
  CHECK(says(given.error(), "7 pages given, but the pool has no buffer with a row per token"));

  const auto tokens = Pool::map(good(), list(memfd(kBytes)));
  REQUIRE(tokens.has_value());
  CHECK(check_page_list(**tokens, 16, 7, {32, 100}, 5).has_value());
  const auto few = check_page_list(**tokens, 16, 7, {32, 100}, 4);
  REQUIRE_FALSE(few.has_value());
  CHECK(says(few.error(), "tokens 32 to 100 need 5 pages of 16 tokens, 4 given"));
}
