#pragma once
// Who owns each page and aux slot of every decode pool at this moment, kept beside the machines and asked at
// every landing. And what every byte of every use of every room is.

#include <map>
#include <string>
#include <vector>

#include "common/pool/pool.h"
#include "common/topology/topology.h"
#include "transport/block.h"

namespace kvferry::sim {

inline constexpr std::uint32_t kAuxSlots = 64;
inline constexpr std::uint32_t kAuxWidth = 32;

/// One byte of KV of use number `use`.
std::byte content(std::uint64_t use, std::uint32_t layer, BufferKind kind, std::uint64_t head_byte,
                  std::uint64_t token);
/// Of its metadata.
std::byte aux_content(std::uint64_t use, std::uint64_t index);

/// A pool of the rank, in fresh memory, every byte 0xA5.
std::shared_ptr<Pool> new_pool(const ModelGeometry& model, const Topology& topology, RankIndex rank,
                               std::uint32_t page_size, std::uint64_t pages);

/// Calls `row(buffer index, row bytes, first byte's head offset, token)` for all rows that `rank` owns of
/// tokens [first, end) when its page list `pages` begins at token `first`.
struct OwnedRow {
  std::uint32_t buffer;
  std::span<std::byte> bytes;
  std::uint64_t head_byte;  // of its first byte, over all heads
  std::uint64_t token;
};
template <class F>
void for_rows(const ModelGeometry& model, const Topology& topology, const Pool& pool,
              const std::vector<std::uint32_t>& pages, std::uint64_t first, std::uint64_t end, F&& row) {
  const Ownership mine = ownership(topology, model, topology.coord(pool.rank()));
  const std::uint64_t page_size = pool.page_size();
  for (std::uint32_t b = 0; b < pool.buffer_count(); ++b) {
    const BufferShape& shape = pool.layout().buffers[b].shape;
    const std::uint64_t head_bytes = model.head_bytes(shape.kind);
    std::uint64_t local = 0;
    for (std::uint64_t token = first; token < end; ++token) {
      if (!mine.tokens.owns(token)) {
        continue;
      }
      const std::uint64_t at = pages[local / page_size] * page_size + local % page_size;
      row(OwnedRow{b, pool.buffer(b).subspan(at * shape.row_bytes, shape.row_bytes),
                   mine.heads.begin * head_bytes, token});
      ++local;
    }
  }
}

class Shadow {
 public:
  /// From now on only `key` may write these pages and this aux slot (below 0: none).
  void grant(const Pool& pool, const std::vector<std::uint32_t>& pages, int aux_slot, const GrantKey& key);
  /// From now on nobody may.
  void revoke(const Pool& pool, const std::vector<std::uint32_t>& pages, int aux_slot);
  void add(std::shared_ptr<const Pool> pool);
  /// Its engine is dead: what happens to this memory matters to nobody.
  void abandon(const Pool& pool);

  /// Empty, or what is wrong with this write.
  std::string check(const BlockHeader& header, std::span<const std::byte> bytes) const;

 private:
  struct Owners {
    std::shared_ptr<const Pool> pool;
    std::vector<GrantKey> pages;  // room 0: nobody
    std::vector<GrantKey> aux;
  };
  std::map<const Pool*, Owners> pools_;
};

}  // namespace kvferry::sim
