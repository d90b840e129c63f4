#include "transport/block.h"

namespace kvferry {
namespace {

constexpr std::uint32_t kMagic = 0x3142564B;  // "KVB1"

template <class T>
void put(std::span<std::byte, kBlockHeaderBytes> out, std::size_t at, T value) {
  for (std::size_t i = 0; i < sizeof(T); ++i) {
    out[at + i] = static_cast<std::byte>(value >> (8 * i));
  }
}

template <class T>
T get(std::span<const std::byte> data, std::size_t at) {
  T value = 0;
  for (std::size_t i = 0; i < sizeof(T); ++i) {
    value = static_cast<T>(value | static_cast<T>(static_cast<T>(data[at + i]) << (8 * i)));
  }
  return value;
}

bool rows_fields_are_zero(const BlockHeader& h) {
  return h.target == 0 && h.row_offset == 0 && h.dst_index == 0 && h.rows == 0 && h.count == 0 &&
         h.step == 0 && h.row_bytes == 0 && h.payload_bytes == 0;
}

Result<void> check_rows(const BlockHeader& h) {
  if (h.rows == 0 || h.count == 0 || h.row_bytes == 0) {
    return fail(Code::kProtocol, "block is empty: rows={} count={} row_bytes={}", h.rows, h.count,
                h.row_bytes);
  }
  if (h.step < h.rows) {
    return fail(Code::kProtocol, "block pieces overlap: step={} is less than rows={}", h.step, h.rows);
  }
  std::uint64_t end = 0;
  const std::uint64_t extent = std::uint64_t{h.count - 1} * h.step;
  if (__builtin_add_overflow(h.dst_index, extent, &end) ||
      __builtin_add_overflow(end, std::uint64_t{h.rows}, &end)) {
    return fail(Code::kProtocol, "block rows wrap around: dst_index={} count={} step={} rows={}", h.dst_index,
                h.count, h.step, h.rows);
  }
  std::uint64_t bytes = 0;
  if (__builtin_mul_overflow(std::uint64_t{h.rows} * h.count, std::uint64_t{h.row_bytes}, &bytes)) {
    return fail(Code::kProtocol, "block bytes overflow: rows={} count={} row_bytes={}", h.rows, h.count,
                h.row_bytes);
  }
  if (bytes != h.payload_bytes) {
    return fail(Code::kProtocol, "block payload is {} bytes, but its rows take {}", h.payload_bytes, bytes);
  }
  return {};
}

Result<void> check_fields(const BlockHeader& h) {
  const bool is_notice = h.type == BlockType::kNotice;
  if (!is_notice && (h.total_bytes != 0 || h.total_blocks != 0)) {
    return fail(Code::kProtocol, "block of type {} carries totals", static_cast<int>(h.type));
  }
  switch (h.type) {
    case BlockType::kRows:
      return check_rows(h);
    case BlockType::kAux:
      if (h.rows != 1 || h.count != 1 || h.step != 1 || h.row_offset != 0) {
        return fail(Code::kProtocol, "aux block is not one row: rows={} count={} step={} row_offset={}",
                    h.rows, h.count, h.step, h.row_offset);
      }
      return check_rows(h);
    case BlockType::kNotice:
    case BlockType::kDrain:
    case BlockType::kDrained:
      if (!rows_fields_are_zero(h)) {
        return fail(Code::kProtocol, "block of type {} names rows", static_cast<int>(h.type));
      }
      return {};
  }
  return fail(Code::kProtocol, "block type {} is unknown", static_cast<int>(h.type));
}

}  // namespace

void encode_block(const BlockHeader& h, std::span<std::byte, kBlockHeaderBytes> out) {
  put(out, 0, kMagic);
  put(out, 4, static_cast<std::uint32_t>(h.type));
  put(out, 8, h.key.grant.room);
  put(out, 16, h.key.grant.generation);
  put(out, 24, h.key.prefill_rank);
  put(out, 28, h.key.grant.decode_rank);
  put(out, 32, h.target);
  put(out, 36, h.row_offset);
  put(out, 40, h.dst_index);
  put(out, 48, h.rows);
  put(out, 52, h.count);
  put(out, 56, h.step);
  put(out, 60, h.row_bytes);
  put(out, 64, h.payload_bytes);
  put(out, 72, h.total_bytes);
  put(out, 80, h.total_blocks);
}

Result<BlockHeader> decode_block(std::span<const std::byte> data) {
  if (data.size() < kBlockHeaderBytes) {
    return fail(Code::kProtocol, "block header is {} bytes, but must be {}", data.size(), kBlockHeaderBytes);
  }
  if (const auto magic = get<std::uint32_t>(data, 0); magic != kMagic) {
    return fail(Code::kProtocol, "block magic is {:#010x}, but must be {:#010x}", magic, kMagic);
  }
  const auto type = get<std::uint32_t>(data, 4);
  if (type < 1 || type > static_cast<std::uint32_t>(BlockType::kDrained)) {
    return fail(Code::kProtocol, "block type {} is unknown", type);
  }
  BlockHeader h;
  h.type = static_cast<BlockType>(type);
  h.key.grant.room = get<std::uint64_t>(data, 8);
  h.key.grant.generation = get<std::uint64_t>(data, 16);
  h.key.prefill_rank = get<std::uint32_t>(data, 24);
  h.key.grant.decode_rank = get<std::uint32_t>(data, 28);
  h.target = get<std::uint32_t>(data, 32);
  h.row_offset = get<std::uint32_t>(data, 36);
  h.dst_index = get<std::uint64_t>(data, 40);
  h.rows = get<std::uint32_t>(data, 48);
  h.count = get<std::uint32_t>(data, 52);
  h.step = get<std::uint32_t>(data, 56);
  h.row_bytes = get<std::uint32_t>(data, 60);
  h.payload_bytes = get<std::uint64_t>(data, 64);
  h.total_bytes = get<std::uint64_t>(data, 72);
  h.total_blocks = get<std::uint64_t>(data, 80);
  if (!room_is_legal(h.key.grant.room)) {
    return fail(Code::kProtocol, "block room {} is not in 1..{}", h.key.grant.room, kRoomMax);
  }
  KVF_TRY_VOID(check_fields(h));
  return h;
}

BlockHeader make_notice(const TransferKey& key, std::uint64_t total_bytes, std::uint64_t total_blocks) {
  BlockHeader header;
  header.type = BlockType::kNotice;
  header.key = key;
  header.total_bytes = total_bytes;
  header.total_blocks = total_blocks;
  return header;
}

BlockHeader make_drain(const TransferKey& key) {
  BlockHeader header;
  header.type = BlockType::kDrain;
  header.key = key;
  return header;
}

std::uint64_t end_index(const BlockHeader& header) {
  return header.dst_index + std::uint64_t{header.count - 1} * header.step + header.rows;
}

}  // namespace kvferry
