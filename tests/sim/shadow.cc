#include "tests/sim/shadow.h"

#include <fmt/format.h>

#include "tests/support/fabric_fixture.h"

namespace kvferry::sim {

std::byte content(std::uint64_t use, std::uint32_t layer, BufferKind kind, std::uint64_t head_byte,
                  std::uint64_t token) {
  const std::uint64_t mixed = (use * 1'000'003 + layer * 7919 + static_cast<std::uint64_t>(kind) * 104'729 +
                               token * 611'953 + head_byte) *
                              0x9E3779B97F4A7C15ull;
  return static_cast<std::byte>(mixed >> 56);
}

std::byte aux_content(std::uint64_t use, std::uint64_t index) {
  return static_cast<std::byte>((use * 31 + index) * 0x9E3779B97F4A7C15ull >> 56);
}

std::shared_ptr<Pool> new_pool(const ModelGeometry& model, const Topology& topology, RankIndex rank,
                               std::uint32_t page_size, std::uint64_t pages) {
  PoolLayout layout;
  layout.rank = rank;
  layout.page_size = page_size;
  std::uint64_t offset = 0;
  for (const BufferShape& shape : rank_buffers(model, topology, topology.coord(rank), pages)) {
    layout.buffers.push_back(BufferPlace{shape, 0, offset});
    offset += shape.pages * page_size * shape.row_bytes;
  }
  layout.aux = {AuxField{"output_ids", kAuxWidth, kAuxSlots, 1, 0},
                AuxField{kAuxRoomField, kAuxWidth, kAuxSlots, 1, std::uint64_t{kAuxWidth} * kAuxSlots}};
  return test::make_pool(std::move(layout), std::byte{0xA5});
}

void Shadow::add(std::shared_ptr<const Pool> pool) {
  Owners owners;
  owners.pages.resize(static_cast<std::size_t>(page_count(pool->layout())));
  owners.aux.resize(kAuxSlots);
  const Pool* key = pool.get();
  owners.pool = std::move(pool);
  pools_.insert_or_assign(key, std::move(owners));
}

void Shadow::abandon(const Pool& pool) {
  pools_.erase(&pool);
}

void Shadow::grant(const Pool& pool, const std::vector<std::uint32_t>& pages, int aux_slot,
                   const GrantKey& key) {
  const auto at = pools_.find(&pool);
  if (at == pools_.end()) {
    return;
  }
  for (const std::uint32_t page : pages) {
    at->second.pages[page] = key;
  }
  if (aux_slot >= 0) {
    at->second.aux[static_cast<std::size_t>(aux_slot)] = key;
  }
}

void Shadow::revoke(const Pool& pool, const std::vector<std::uint32_t>& pages, int aux_slot) {
  grant(pool, pages, aux_slot, GrantKey{});
}

std::string Shadow::check(const BlockHeader& header, std::span<const std::byte> bytes) const {
  const auto inside = [&bytes](std::span<const std::byte> whole) {
    return bytes.data() >= whole.data() && bytes.data() + bytes.size() <= whole.data() + whole.size();
  };
  for (const auto& [key, owners] : pools_) {
    const Pool& pool = *owners.pool;
    for (std::uint32_t b = 0; b < pool.buffer_count(); ++b) {
      const auto buffer = pool.buffer(b);
      if (!inside(buffer)) {
        continue;
      }
      const std::uint64_t page_bytes =
          std::uint64_t{pool.page_size()} * pool.layout().buffers[b].shape.row_bytes;
      const auto begin = static_cast<std::uint64_t>(bytes.data() - buffer.data());
      for (std::uint64_t page = begin / page_bytes; page <= (begin + bytes.size() - 1) / page_bytes; ++page) {
        const GrantKey& owner = owners.pages[page];
        if (owner != header.key.grant) {
          return fmt::format("room {} generation {} writes page {} of decode rank {}, which belongs to {}",
                             header.key.grant.room, header.key.grant.generation, page, pool.rank(),
                             owner.room == 0
                                 ? std::string("the engine")
                                 : fmt::format("room {} generation {}", owner.room, owner.generation));
        }
      }
      return {};
    }
    for (std::uint32_t field = 0; field < pool.layout().aux.size(); ++field) {
      for (std::uint32_t slot = 0; slot < kAuxSlots; ++slot) {
        if (inside(pool.aux_row(field, slot))) {
          return owners.aux[slot] == header.key.grant
                     ? std::string()
                     : fmt::format(
                           "room {} generation {} writes aux slot {} of decode rank {}, which is "
                           "not its own",
                           header.key.grant.room, header.key.grant.generation, slot, pool.rank());
        }
      }
    }
  }
  return {};  // a pool whose engine is dead
}

}  // namespace kvferry::sim
