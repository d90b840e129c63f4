#include "common/pool/pool.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>

#include "common/base/check.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace kvferry {
namespace {

/// Checks that [offset, offset + bytes) lies in descriptor `fd`.
Result<void> check_range(const std::string& name, std::uint32_t fd, std::uint64_t offset, std::uint64_t bytes,
                         const std::vector<std::uint64_t>& sizes) {
  if (fd >= sizes.size()) {
    return fail(Code::kInvalid, "{}: descriptor {} is not among the {} passed", name, fd, sizes.size());
  }
  std::uint64_t end = 0;
  if (__builtin_add_overflow(offset, bytes, &end)) {
    return fail(Code::kInvalid, "{}: offset {} plus {} bytes wraps around", name, offset, bytes);
  }
  if (end > sizes[fd]) {
    return fail(
        Code::kInvalid,
        "{}: ends at byte {}, but descriptor {} has {} bytes; make the memory larger or give fewer pages",
        name, end, fd, sizes[fd]);
  }
  return {};
}

Result<std::uint64_t> buffer_bytes(const PoolLayout& layout, std::size_t index, const std::string& name) {
  const BufferShape& shape = layout.buffers[index].shape;
  if (shape.pages == 0 || shape.row_bytes == 0) {
    return fail(Code::kInvalid, "{}: pages is {} and row_bytes is {}, but both must be at least 1", name,
                shape.pages, shape.row_bytes);
  }
  const std::uint32_t rows = shape.rows_of_page(layout.page_size);
  const std::uint32_t pitch = shape.pitch_of(layout.page_size);
  if (pitch < rows) {
    return fail(Code::kInvalid, "{}: its pages of {} rows lie only {} rows apart, so they overlap", name,
                rows, pitch);
  }
  std::uint64_t all = 0;
  if (!buffer_rows(shape, layout.page_size, all)) {
    return fail(Code::kInvalid, "{}: {} pages of {} rows of {} bytes do not fit 63 bits", name, shape.pages,
                pitch, shape.row_bytes);
  }
  return all * shape.row_bytes;
}

std::string buffer_name(const PoolLayout& layout, std::size_t index) {
  return fmt::format("pool of rank {}, buffer {} (layer {})", layout.rank, index,
                     layout.buffers[index].shape.layer);
}

/// Size of the descriptor; refuses what a later truncation could turn into SIGBUS.
Result<std::uint64_t> checked_size(const PoolLayout& layout, std::size_t index, int fd) {
  struct stat info = {};
  if (::fstat(fd, &info) != 0) {
    return fail(errno_error(fmt::format("pool of rank {}, descriptor {}: fstat", layout.rank, index), errno));
  }
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0) {
    return fail(
        Code::kInvalid,
        "pool of rank {}, descriptor {} is not a memfd; pass memory made by memfd_create(MFD_ALLOW_SEALING)",
        layout.rank, index);
  }
  if ((seals & F_SEAL_SHRINK) == 0) {
    return fail(Code::kInvalid,
                "pool of rank {}, descriptor {} is not sealed against shrinking (seals {:#x}); call "
                "fcntl(F_ADD_SEALS, F_SEAL_SHRINK) first",
                layout.rank, index, seals);
  }
  if ((seals & F_SEAL_WRITE) != 0) {
    return fail(Code::kInvalid, "pool of rank {}, descriptor {} is sealed against writing (seals {:#x})",
                layout.rank, index, seals);
  }
  return static_cast<std::uint64_t>(info.st_size);
}

Result<std::byte*> map_descriptor(const PoolLayout& layout, std::size_t index, int fd, std::uint64_t bytes) {
  if (bytes == 0 || bytes > std::numeric_limits<std::size_t>::max() / 2) {
    return fail(Code::kInvalid, "pool of rank {}, descriptor {} has {} bytes and cannot be mapped",
                layout.rank, index, bytes);
  }
  void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) {
    return fail(errno_error(
        fmt::format("pool of rank {}, descriptor {}: mmap of {} bytes", layout.rank, index, bytes), errno));
  }
  // First touch inside a transfer halves its speed. Kernels before 5.14 do not know the advice, and then the
  // pages simply fault in one by one.
  (void)::madvise(base, bytes, MADV_POPULATE_WRITE);
  return static_cast<std::byte*>(base);
}

}  // namespace

Result<void> Pool::lock_for_writing() {
  KVF_TRY(writing_, WriterLock::take(fds_));
  return {};
}

Result<std::shared_ptr<Pool>> Pool::map(PoolLayout layout, std::vector<UniqueFd> fds) {
  if (layout.page_size == 0) {
    return fail(Code::kInvalid, "pool of rank {}: page_size is 0, but must be at least 1", layout.rank);
  }
  if (layout.buffers.empty()) {
    return fail(Code::kInvalid, "pool of rank {} has no buffers", layout.rank);
  }
  std::vector<std::uint64_t> sizes;
  for (std::size_t i = 0; i < fds.size(); ++i) {
    KVF_TRY(const std::uint64_t size, checked_size(layout, i, fds[i].get()));
    sizes.push_back(size);
  }
  for (std::size_t i = 0; i < layout.buffers.size(); ++i) {
    const std::string name = buffer_name(layout, i);
    KVF_TRY(const std::uint64_t bytes, buffer_bytes(layout, i, name));
    KVF_TRY_VOID(check_range(name, layout.buffers[i].fd, layout.buffers[i].offset, bytes, sizes));
  }
  for (const AuxField& field : layout.aux) {
    const std::string name = fmt::format("pool of rank {}, aux field '{}'", layout.rank, field.name);
    if (field.width == 0 || field.slots == 0) {
      return fail(Code::kInvalid, "{}: width is {} and slots is {}, but both must be at least 1", name,
                  field.width, field.slots);
    }
    const std::uint64_t bytes = std::uint64_t{field.width} * field.slots;
    KVF_TRY_VOID(check_range(name, field.fd, field.offset, bytes, sizes));
  }
  std::shared_ptr<Pool> pool(new Pool());
  for (std::size_t i = 0; i < fds.size(); ++i) {
    KVF_TRY(std::byte* const base, map_descriptor(layout, i, fds[i].get(), sizes[i]));
    pool->mappings_.push_back(Mapping{base, sizes[i]});
  }
  for (const BufferPlace& place : layout.buffers) {
    std::uint64_t rows = 0;
    KVF_CHECK(buffer_rows(place.shape, layout.page_size, rows));
    const std::uint64_t bytes = rows * place.shape.row_bytes;
    pool->buffers_.emplace_back(pool->mappings_[place.fd].base + place.offset,
                                static_cast<std::size_t>(bytes));
  }
  for (const AuxField& field : layout.aux) {
    pool->aux_.emplace_back(pool->mappings_[field.fd].base + field.offset,
                            std::size_t{field.width} * field.slots);
  }
  pool->layout_ = std::move(layout);
  pool->fds_ = std::move(fds);
  return pool;
}

Pool::~Pool() {
  for (const Mapping& mapping : mappings_) {
    ::munmap(mapping.base, mapping.bytes);
  }
}

std::span<std::byte> Pool::aux_row(std::uint32_t index, std::uint32_t slot) const {
  KVF_CHECK(index < layout_.aux.size());
  const AuxField& field = layout_.aux[index];
  KVF_CHECK(slot < field.slots);
  return aux_[index].subspan(std::size_t{slot} * field.width, field.width);
}

std::uint64_t Pool::mapped_bytes() const {
  std::uint64_t bytes = 0;
  for (const Mapping& mapping : mappings_) {
    bytes += mapping.bytes;
  }
  return bytes;
}

std::uint64_t page_count(const PoolLayout& layout, RowSpace space) {
  std::uint64_t pages = std::numeric_limits<std::uint64_t>::max();
  bool any = false;
  for (const BufferPlace& place : layout.buffers) {
    if (place.space == space || (space == RowSpace::kTokens && place.space == RowSpace::kDraft)) {
      pages = std::min(pages, place.shape.pages);
      any = true;
    }
  }
  return any ? pages : 0;
}

void set_spaces(const ModelGeometry& model, PoolLayout& layout) {
  for (BufferPlace& place : layout.buffers) {
    place.space = model.row_space(place.shape.id());
  }
}

std::vector<BufferShape> shapes(const PoolLayout& layout) {
  std::vector<BufferShape> result;
  result.reserve(layout.buffers.size());
  for (const BufferPlace& place : layout.buffers) {
    result.push_back(place.shape);
  }
  return result;
}

}  // namespace kvferry
