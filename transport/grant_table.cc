#include "transport/grant_table.h"

#include <algorithm>
#include <utility>

namespace kvferry {
namespace {

tl::unexpected<Refusal> discard(Error error) {
  return tl::unexpected<Refusal>(Refusal{true, std::move(error)});
}

template <class... Args>
tl::unexpected<Refusal> illegal(fmt::format_string<Args...> format, Args&&... args) {
  return tl::unexpected<Refusal>(
      Refusal{false, Error{Code::kProtocol, fmt::format(format, std::forward<Args>(args)...)}});
}

Result<void> check_pages(const Grant& grant, const Pool& pool) {
  if (!grant.pages) {
    return fail(Code::kInvalid, "grant of room {} has no page list", grant.key.room);
  }
  for (const RowSpace space : {RowSpace::kTokens, RowSpace::kWindow, RowSpace::kState}) {
    const std::uint64_t limit = page_count(pool.layout(), space);
    if (const Grant::Pages& pages = grant.pages_of(space)) {
      for (const std::uint32_t page : *pages) {
        if (page >= limit) {
          return fail(Code::kInvalid,
                      "grant of room {} names {} page {}, but pool of decode rank {} has {} pages",
                      grant.key.room, to_string(space), page, grant.key.decode_rank, limit);
        }
      }
    }
  }
  return {};
}

Result<void> check_aux_slot(const Grant& grant, const Pool& pool) {
  if (!grant.has_aux) {
    return {};
  }
  for (const AuxField& field : pool.layout().aux) {
    if (grant.aux_slot >= field.slots) {
      return fail(Code::kInvalid, "grant of room {} names aux slot {}, but field '{}' has {} slots",
                  grant.key.room, grant.aux_slot, field.name, field.slots);
    }
  }
  return {};
}

}  // namespace

std::byte* Placement::row_address(std::uint64_t index) const {
  if (!pages_) {
    return base_;
  }
  const std::uint64_t row = std::uint64_t{(*pages_)[index / page_rows_]} * pitch_ + index % page_rows_;
  return base_ + row * stride_ + header_.row_offset;
}

std::span<std::byte> Placement::next() {
  if (bytes_left_ == 0) {
    return {};
  }
  const bool whole_rows = header_.row_bytes == stride_;
  std::byte* begin = nullptr;
  std::uint64_t bytes = 0;
  while (bytes < bytes_left_) {
    const std::uint64_t index = header_.dst_index + std::uint64_t{piece_} * header_.step + row_;
    std::byte* address = row_address(index);
    if (begin == nullptr) {
      begin = address;
    } else if (address != begin + bytes) {
      break;
    }
    // Within a page, rows follow each other; the page's end is where the list decides again.
    std::uint32_t rows = 1;
    if (whole_rows && pages_) {
      const std::uint64_t left_in_page = page_rows_ - index % page_rows_;
      rows = static_cast<std::uint32_t>(std::min<std::uint64_t>(header_.rows - row_, left_in_page));
    }
    bytes += std::uint64_t{rows} * header_.row_bytes;
    row_ += rows;
    if (row_ == header_.rows) {
      row_ = 0;
      ++piece_;
    }
    if (!whole_rows) {
      break;
    }
  }
  bytes_left_ -= bytes;
  return {begin, static_cast<std::size_t>(bytes)};
}

void GrantTable::add_pool(std::shared_ptr<const Pool> pool) {
  const RankIndex rank = pool->rank();
  pools_[rank] = std::move(pool);
}

void GrantTable::remove_pool(RankIndex rank) {
  pools_.erase(rank);
}

std::shared_ptr<const Pool> GrantTable::pool(RankIndex rank) const {
  const auto found = pools_.find(rank);
  return found == pools_.end() ? nullptr : found->second;
}

Result<void> GrantTable::open(Grant grant) {
  const auto pool = pools_.find(grant.key.decode_rank);
  if (pool == pools_.end()) {
    return fail(Code::kNotFound, "grant of room {} names decode rank {}, which has no pool here",
                grant.key.room, grant.key.decode_rank);
  }
  if (grants_.contains(grant.key)) {
    return fail(Code::kConflict, "grant of room {} generation {} for decode rank {} is open already",
                grant.key.room, grant.key.generation, grant.key.decode_rank);
  }
  KVF_TRY_VOID(check_pages(grant, *pool->second));
  KVF_TRY_VOID(check_aux_slot(grant, *pool->second));
  Entry entry;
  entry.pool = pool->second;
  for (const auto& [rank, peer] : grant.sources) {
    const auto same_rank = [wanted = rank](const Source& source) { return source.rank == wanted; };
    if (std::any_of(entry.sources.begin(), entry.sources.end(), same_rank)) {
      return fail(Code::kInvalid, "grant of room {} names prefill rank {} twice", grant.key.room, rank);
    }
    Source source;
    source.rank = rank;
    source.peer = peer;
    entry.sources.push_back(source);
  }
  const GrantKey key = grant.key;
  entry.grant = std::move(grant);
  grants_.emplace(key, std::move(entry));
  return {};
}

bool GrantTable::close(const GrantKey& key) {
  return grants_.erase(key) != 0;
}

Admission<GrantTable::Found> GrantTable::find(const BlockHeader& header, PeerId peer) {
  const GrantKey& key = header.key.grant;
  const auto found = grants_.find(key);
  if (found == grants_.end()) {
    return discard(
        Error{Code::kNotFound, fmt::format("grant of room {} generation {} for decode rank {} is not "
                                           "open",
                                           key.room, key.generation, key.decode_rank)});
  }
  Entry& entry = found->second;
  const auto pool = pools_.find(key.decode_rank);
  if (pool == pools_.end() || pool->second != entry.pool) {
    return discard(Error{Code::kNotFound, fmt::format("pool of decode rank {} was detached after room {} was "
                                                      "granted",
                                                      key.decode_rank, key.room)});
  }
  for (Source& source : entry.sources) {
    if (source.rank == header.key.prefill_rank) {
      if (source.peer != peer) {
        return illegal("room {}: prefill rank {} belongs to another peer", key.room, source.rank);
      }
      return Found{&entry, &source};
    }
  }
  return illegal("room {}: prefill rank {} is not a source of this grant", key.room, header.key.prefill_rank);
}

Admission<Placement> GrantTable::admit(const BlockHeader& header, PeerId peer) {
  auto found = find(header, peer);
  if (!found) {
    return tl::unexpected<Refusal>(std::move(found).error());
  }
  const Entry& entry = *found->entry;
  Source& source = *found->source;
  Placement placement;
  if (header.type == BlockType::kAux) {
    const auto& fields = entry.pool->layout().aux;
    if (!entry.grant.has_aux || header.dst_index != entry.grant.aux_slot || header.target >= fields.size()) {
      return illegal("room {}: aux field {} slot {} is outside the grant", header.key.grant.room,
                     header.target, header.dst_index);
    }
    if (header.row_bytes > fields[header.target].width) {
      return illegal("room {}: aux field '{}' takes {} bytes, but the block has {}", header.key.grant.room,
                     fields[header.target].name, fields[header.target].width, header.row_bytes);
    }
    placement.base_ = entry.pool->aux_row(header.target, entry.grant.aux_slot).data();
    placement.stride_ = header.row_bytes;
  } else {
    if (header.target >= entry.pool->buffer_count()) {
      return illegal("room {}: buffer {} does not exist, the pool has {}", header.key.grant.room,
                     header.target, entry.pool->buffer_count());
    }
    const BufferPlace& place = entry.pool->layout().buffers[header.target];
    const Grant::Pages& pages = entry.grant.pages_of(place.space);
    const std::uint64_t page_rows = place.shape.rows_of_page(entry.pool->page_size());
    const std::uint64_t row_limit = pages ? page_rows * pages->size() : 0;
    if (end_index(header) > row_limit) {
      return illegal("room {}: {} rows up to {} are outside the grant of {} rows", header.key.grant.room,
                     to_string(place.space), end_index(header), row_limit);
    }
    placement.stride_ = place.shape.row_bytes;
    if (std::uint64_t{header.row_offset} + header.row_bytes > placement.stride_) {
      return illegal("room {}: bytes {}..{} are outside the {}-byte rows of buffer {}", header.key.grant.room,
                     header.row_offset, std::uint64_t{header.row_offset} + header.row_bytes,
                     placement.stride_, header.target);
    }
    placement.base_ = entry.pool->buffer(header.target).data();
    placement.pages_ = pages;
    placement.page_rows_ = static_cast<std::uint32_t>(page_rows);
    placement.pitch_ = place.shape.pitch_of(entry.pool->page_size());
  }
  std::uint64_t bytes = 0;
  if (__builtin_add_overflow(source.admitted_bytes, header.payload_bytes, &bytes) ||
      (source.noticed && (bytes > source.total_bytes || source.admitted_blocks >= source.total_blocks))) {
    return illegal("room {}: prefill rank {} sends more than the {} bytes in {} blocks it announced",
                   header.key.grant.room, source.rank, source.total_bytes, source.total_blocks);
  }
  source.admitted_bytes = bytes;
  ++source.admitted_blocks;
  placement.pool_ = entry.pool;
  placement.header_ = header;
  placement.bytes_left_ = header.payload_bytes;
  return placement;
}

Admission<std::optional<fabric_event::Landed>> GrantTable::arrived(const BlockHeader& header, PeerId peer) {
  auto found = find(header, peer);
  if (!found) {
    return tl::unexpected<Refusal>(std::move(found).error());
  }
  Source& source = *found->source;
  source.arrived_bytes += header.payload_bytes;
  ++source.arrived_blocks;
  return landed_now(source, header);
}

Admission<std::optional<fabric_event::Landed>> GrantTable::notice(const BlockHeader& header, PeerId peer) {
  auto found = find(header, peer);
  if (!found) {
    return tl::unexpected<Refusal>(std::move(found).error());
  }
  Source& source = *found->source;
  if (source.noticed) {
    return illegal("room {}: second notice of prefill rank {}", header.key.grant.room, source.rank);
  }
  if (source.admitted_bytes > header.total_bytes || source.admitted_blocks > header.total_blocks) {
    return illegal("room {}: prefill rank {} announced {} bytes in {} blocks, but sent {} in {}",
                   header.key.grant.room, source.rank, header.total_bytes, header.total_blocks,
                   source.admitted_bytes, source.admitted_blocks);
  }
  source.noticed = true;
  source.total_bytes = header.total_bytes;
  source.total_blocks = header.total_blocks;
  return landed_now(source, header);
}

std::optional<fabric_event::Landed> GrantTable::landed_now(Source& source, const BlockHeader& header) {
  const bool complete = source.noticed && source.arrived_bytes == source.total_bytes &&
                        source.arrived_blocks == source.total_blocks;
  if (!complete || source.landed) {
    return std::nullopt;
  }
  source.landed = true;
  return fabric_event::Landed{source.peer, header.key, source.total_bytes};
}

}  // namespace kvferry
