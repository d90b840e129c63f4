// A sequence of blocks from two peers against one grant: whatever the headers say, the table hands out
// nothing but rows of granted pages, exactly as many bytes as announced, and reports each source at most
// once.

#include <algorithm>

#include "tests/fuzz/fuzz.h"
#include "tests/support/fabric_fixture.h"
#include "transport/grant_table.h"

namespace kvferry::fuzz {
namespace {

constexpr std::uint32_t kRowBytes = 64;
constexpr std::uint32_t kPageRows = 4;
const std::vector<std::uint32_t> kPages = {7, 8, 2};
const GrantKey kKey{5, 1, 0};
constexpr std::uint32_t kAuxSlot = 1;

std::shared_ptr<Pool> shared_pool() {
  static const std::shared_ptr<Pool> pool = [] {
    PoolLayout layout;
    layout.page_size = kPageRows;
    layout.buffers = {BufferPlace{BufferShape{0, BufferKind::kKey, kRowBytes, 10}, 0, 64},
                      BufferPlace{BufferShape{0, BufferKind::kValue, kRowBytes, 10}, 0, 4096}};
    layout.aux = {AuxField{"bootstrap_room", 16, 3, 1, 0}};
    return test::make_pool(layout, std::byte{0});
  }();
  return pool;
}

bool inside_grant(const BlockHeader& header, std::span<std::byte> span) {
  const auto within = [&](std::span<std::byte> area) {
    return span.data() >= area.data() && span.data() + span.size() <= area.data() + area.size();
  };
  if (header.type == BlockType::kAux) {
    return within(shared_pool()->aux_row(0, kAuxSlot));
  }
  // Consecutive pages may come as one span; each of its bytes is in a granted one.
  const std::span<std::byte> buffer = shared_pool()->buffer(header.target);
  if (!within(buffer)) {
    return false;
  }
  constexpr std::size_t kPageBytes = std::size_t{kPageRows} * kRowBytes;
  const auto begin = static_cast<std::size_t>(span.data() - buffer.data());
  for (std::size_t page = begin / kPageBytes; page * kPageBytes < begin + span.size(); ++page) {
    if (std::find(kPages.begin(), kPages.end(), page) == kPages.end()) {
      return false;
    }
  }
  return true;
}

std::string step_of(std::uint8_t peer, const BlockHeader& header) {
  BlockBytes bytes{};
  encode_block(header, bytes);
  return static_cast<char>(peer) + string_of(bytes);
}

void place(GrantTable& table, const BlockHeader& header, PeerId peer, int& landed) {
  auto placement = table.admit(header, peer);
  if (!placement) {
    check_reason(placement.error().error);
    return;
  }
  std::uint64_t bytes = 0;
  for (auto span = placement->next(); !span.empty(); span = placement->next()) {
    KVF_CHECK(inside_grant(header, span));
    bytes += span.size();
  }
  KVF_CHECK(bytes == header.payload_bytes && placement->bytes_left() == 0);
  const auto arrived = table.arrived(header, peer);
  KVF_CHECK(arrived.has_value());
  landed += arrived->has_value() ? 1 : 0;
}

}  // namespace

std::vector<std::string> seeds() {
  const auto rows = [](RankIndex rank, std::uint32_t target, std::uint64_t index, std::uint32_t count) {
    return BlockHeader{.key = {kKey, rank},
                       .target = target,
                       .dst_index = index,
                       .rows = count,
                       .count = 1,
                       .step = count,
                       .row_bytes = kRowBytes,
                       .payload_bytes = std::uint64_t{count} * kRowBytes};
  };
  BlockHeader pieces = rows(0, 1, 1, 2);
  pieces.count = 3;
  pieces.step = 4;
  pieces.payload_bytes *= 3;
  BlockHeader slice = rows(1, 0, 0, 12);
  slice.row_offset = 16;
  slice.row_bytes = 32;
  slice.payload_bytes = 12 * 32;
  const BlockHeader aux{.type = BlockType::kAux,
                        .key = {kKey, 0},
                        .target = 0,
                        .dst_index = kAuxSlot,
                        .rows = 1,
                        .count = 1,
                        .step = 1,
                        .row_bytes = 16,
                        .payload_bytes = 16};
  const TransferKey first{kKey, 0};
  return {step_of(0, rows(0, 0, 0, 12)) + step_of(0, make_notice(first, 12 * kRowBytes, 1)),
          step_of(0, make_notice(first, 6 * kRowBytes + 16, 2)) + step_of(0, aux) + step_of(0, pieces),
          step_of(1, slice) + step_of(1, make_notice({kKey, 1}, 12 * 32, 1)) + step_of(0, slice),
          step_of(0, rows(0, 1, 11, 1)) + step_of(2, rows(0, 1, 0, 1)) + step_of(0, make_drain(first))};
}

}  // namespace kvferry::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvferry;
  using namespace kvferry::fuzz;
  GrantTable table;
  table.add_pool(shared_pool());
  Grant grant;
  grant.key = kKey;
  grant.pages = std::make_shared<const std::vector<std::uint32_t>>(kPages);
  grant.has_aux = true;
  grant.aux_slot = kAuxSlot;
  grant.sources = {{0, PeerId{0}}, {1, PeerId{1}}};
  KVF_CHECK(table.open(grant).has_value());
  int landed = 0;
  for (Input input(data, size); !input.empty();) {
    const PeerId peer = input.byte() % 3;
    const auto header = decode_block(bytes_of(input.take(kBlockHeaderBytes)));
    if (!header) {
      continue;
    }
    if (header->type == BlockType::kRows || header->type == BlockType::kAux) {
      place(table, *header, peer, landed);
    } else if (header->type == BlockType::kNotice) {
      const auto noticed = table.notice(*header, peer);
      landed += noticed && noticed->has_value() ? 1 : 0;
    }
  }
  KVF_CHECK(landed <= 2);
  KVF_CHECK(table.close(kKey) && table.open_count() == 0);
  return 0;
}
