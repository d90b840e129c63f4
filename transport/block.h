#pragma once
// The wire form of one block: a part of one transfer that a receiver can check and place by itself. Shared by
// every fabric whose receiver places the bytes. A block is a header of kBlockHeaderBytes, then payload_bytes
// of row slices in the order of their destination rows. All integers are little-endian:
//
//   0 magic "KVB1" | 4 type u8 | 5 zero x3 | 8 room u64 | 16 generation u64 | 24 prefill_rank u32
//   28 decode_rank u32 | 32 target u32 | 36 row_offset u32 | 40 dst_index u64 | 48 rows u32 | 52 count u32
//   56 step u32 | 60 row_bytes u32 | 64 payload_bytes u64 | 72 total_bytes u64 | 80 total_blocks u64
//
// Fields that a type does not use are zero. Nothing in a header is an address: rows are named in the room's
// own granted row space, so a block cannot even express memory outside the grant's pages.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "common/base/ids.h"
#include "common/base/result.h"

namespace kvferry {

enum class BlockType : std::uint8_t {
  kRows = 1,     // row slices of buffer `target`
  kAux = 2,      // the first `row_bytes` bytes of aux field `target`, slot `dst_index`
  kNotice = 3,   // all of the transfer's bytes and blocks, sent before or after it, are counted here
  kDrain = 4,    // the sender will send nothing more of this transfer on this stream
  kDrained = 5,  // the receiver's answer: all of it that was on this stream has been placed or discarded
};

struct BlockHeader {
  BlockType type = BlockType::kRows;
  TransferKey key;
  std::uint32_t target = 0;      // destination buffer index, or aux field index
  std::uint32_t row_offset = 0;  // bytes into the destination row
  std::uint64_t dst_index = 0;   // first destination row in the granted row space (RowRun::dst_index)
  std::uint32_t rows = 0;        // consecutive rows per piece
  std::uint32_t count = 0;       // pieces
  std::uint32_t step = 0;        // rows from one piece to the next, at least `rows`
  std::uint32_t row_bytes = 0;   // per row
  std::uint64_t payload_bytes = 0;
  std::uint64_t total_bytes = 0;   // kNotice: KV and aux bytes of the whole transfer
  std::uint64_t total_blocks = 0;  // kNotice: kRows and kAux blocks of the whole transfer

  friend bool operator==(const BlockHeader&, const BlockHeader&) = default;
};

inline constexpr std::size_t kBlockHeaderBytes = 88;
using BlockBytes = std::array<std::byte, kBlockHeaderBytes>;

/// Writes the wire form. The header must be one that decode_block() accepts.
void encode_block(const BlockHeader& header, std::span<std::byte, kBlockHeaderBytes> out);

/// Reads and checks everything that can be checked without a grant: magic, type, room, no overflow in rows
/// and bytes, payload equal to rows times bytes, no empty or overlapping pieces, unused fields zero.
/// kProtocol otherwise; `data` may have any length.
Result<BlockHeader> decode_block(std::span<const std::byte> data);

BlockHeader make_notice(const TransferKey& key, std::uint64_t total_bytes, std::uint64_t total_blocks);
BlockHeader make_drain(const TransferKey& key);

/// One past the last granted row that a kRows header names. Only for headers that decode_block() accepted.
std::uint64_t end_index(const BlockHeader& header);

}  // namespace kvferry
