#include "tools/engine/rank_memory.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "tools/engine/pattern.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace kvferry {
namespace {

constexpr std::uint64_t kOsPage = 4096;

std::uint64_t align(std::uint64_t value) {
  return (value + kOsPage - 1) / kOsPage * kOsPage;
}

Result<UniqueFd> sealed_memory(RankIndex rank, std::uint64_t bytes) {
  UniqueFd fd(::memfd_create("kvferry-synthetic-pool", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) {
    return fail(errno_error("memfd_create", errno));
  }
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    return fail(Code::kIo, "the pool of rank {} needs {} bytes: {}", rank, bytes, std::strerror(errno));
  }
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK) != 0) {
    return fail(errno_error("sealing the pool against shrinking", errno));
  }
  return fd;
}

std::array<std::byte, 8> room_bytes(Room room) {
  std::array<std::byte, 8> bytes{};
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<std::byte>(room >> (8 * i));
  }
  return bytes;
}

}  // namespace

Result<RankMemory> RankMemory::create(const RankRows& rows, std::uint32_t aux_slots) {
  RankMemory memory;
  std::vector<std::uint64_t> offsets;
  for (std::uint32_t i = 0; i < rows.buffers().size(); ++i) {
    if (const auto nest = rows.nest(i); nest) {
      offsets.push_back(offsets[nest->buffer] +
                        nest->offset);  // inside the other's pages; the last one ends it
      memory.bytes_ = std::max(memory.bytes_, align(offsets.back() + rows.buffer_bytes(i)));
      continue;
    }
    offsets.push_back(memory.bytes_);
    memory.bytes_ += align(rows.buffer_bytes(i) + rows.tail_bytes(i));
  }
  for (const AuxFieldShape& field : kAuxSchema) {
    offsets.push_back(memory.bytes_);
    memory.bytes_ += align(std::uint64_t{field.width} * aux_slots);
  }
  KVF_TRY(memory.fd_, sealed_memory(rows.rank(), memory.bytes_));
  void* base = ::mmap(nullptr, memory.bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, memory.fd_.get(), 0);
  if (base == MAP_FAILED) {
    return fail(Code::kIo, "mapping the pool of rank {} ({} bytes): {}", rows.rank(), memory.bytes_,
                std::strerror(errno));
  }
  memory.base_ = static_cast<std::byte*>(base);
  // Kernels before 5.14 do not know the advice; there, pages come on first use.
  if (::madvise(base, memory.bytes_, MADV_POPULATE_WRITE) != 0 && errno != EINVAL) {
    return fail(Code::kExhausted, "the pool of rank {} needs {} bytes of memory: {}. Use fewer pages",
                rows.rank(), memory.bytes_, std::strerror(errno));
  }
  for (std::uint32_t i = 0; i < rows.buffers().size(); ++i) {
    const BufferShape& shape = rows.buffers()[i];
    memory.buffers_.emplace_back(memory.base_ + offsets[i], rows.buffer_bytes(i));
    const std::uint32_t page_rows = shape.rows_of_page(rows.page_size());
    memory.pool_buffers_.push_back({shape.layer, static_cast<std::uint32_t>(shape.kind), shape.row_bytes,
                                    shape.pages, memory.fd_.get(), offsets[i], page_rows,
                                    std::uint64_t{shape.pitch_of(rows.page_size())} * shape.row_bytes});
  }
  for (std::uint32_t i = 0; i < kAuxFields; ++i) {
    const std::uint64_t offset = offsets[rows.buffers().size() + i];
    memory.aux_.push_back(memory.base_ + offset);
    memory.pool_aux_.push_back(
        {kAuxSchema[i].name, kAuxSchema[i].width, aux_slots, memory.fd_.get(), offset});
  }
  return memory;
}

RankMemory::~RankMemory() {
  if (base_ != nullptr) {
    ::munmap(base_, bytes_);
  }
}

RankMemory::RankMemory(RankMemory&& other) noexcept
    : fd_(std::move(other.fd_)),
      base_(std::exchange(other.base_, nullptr)),
      bytes_(other.bytes_),
      buffers_(std::move(other.buffers_)),
      aux_(std::move(other.aux_)),
      pool_buffers_(std::move(other.pool_buffers_)),
      pool_aux_(std::move(other.pool_aux_)) {}

std::span<std::byte> RankMemory::aux(std::uint32_t field, std::uint32_t slot) const {
  const std::uint32_t width = kAuxSchema[field].width;
  return {aux_[field] + std::uint64_t{slot} * width, width};
}

void fill_aux(const RankMemory& memory, std::uint32_t slot, Room room) {
  for (std::uint32_t field = 0; field < kAuxFields; ++field) {
    fill_pattern(memory.aux(field, slot), aux_seed(room, field));
  }
  const auto bytes = room_bytes(room);
  std::memcpy(memory.aux(kAuxRoomIndex, slot).data(), bytes.data(), bytes.size());
}

void clear_aux(const RankMemory& memory, std::uint32_t slot) {
  for (std::uint32_t field = 0; field < kAuxFields; ++field) {
    const auto row = memory.aux(field, slot);
    std::memset(row.data(), 0, row.size());
  }
}

AuxReport check_aux(const RankMemory& memory, std::uint32_t slot, Room room) {
  AuxReport report;
  const auto note = [&](std::uint32_t field, std::size_t byte, std::byte expected, std::byte found) {
    if (report.differing++ == 0) {
      report.first = fmt::format("field {} byte {}: expected {:#04x}, found {:#04x}", kAuxSchema[field].name,
                                 byte, static_cast<unsigned>(expected), static_cast<unsigned>(found));
    }
  };
  std::vector<std::byte> expected;
  const auto id = room_bytes(room);
  for (std::uint32_t field = 0; field < kAuxFields; ++field) {
    const auto row = memory.aux(field, slot);
    expected.resize(row.size());
    fill_pattern(expected, aux_seed(room, field));
    if (field == kAuxRoomIndex) {
      std::memcpy(expected.data(), id.data(), id.size());
    }
    for (std::size_t i = 0; i < row.size(); ++i) {
      if (row[i] != expected[i]) {
        note(field, i, expected[i], row[i]);
      }
    }
    report.compared += row.size();
  }
  return report;
}

}  // namespace kvferry
