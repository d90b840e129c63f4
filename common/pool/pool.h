#pragma once
// A rank's pool in this process: the buffers an engine (or a peer daemon on the same host) handed over as
// file descriptors, validated and mapped. The mapping lives as long as the Pool, whatever happens to the
// engine.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/base/ids.h"
#include "common/base/result.h"
#include "common/base/unique_fd.h"
#include "common/plan/plan.h"
#include "common/pool/writer_lock.h"

namespace kvferry {

/// Where one buffer lies: buffer_rows() * row_bytes bytes at `offset` of descriptor number `fd`. Buffers may
/// interleave, page by page, where their pitch leaves room.
struct BufferPlace {
  BufferShape shape;
  std::uint32_t fd = 0;                // index into the descriptors passed beside this layout
  std::uint64_t offset = 0;            // bytes, any alignment
  RowSpace space = RowSpace::kTokens;  // from the model; which page list of a request names its pages
};

/// One field of the aux row (metadata of the first token): `slots` rows of `width` bytes. Both sides pair
/// fields by name, never by position or by their own row length.
struct AuxField {
  std::string name;
  std::uint32_t width = 0;
  std::uint32_t slots = 0;
  std::uint32_t fd = 0;
  std::uint64_t offset = 0;
};

/// The aux field whose first 8 bytes (little-endian) hold the room; checked on landing when present.
inline constexpr const char* kAuxRoomField = "bootstrap_room";

struct PoolLayout {
  RankIndex rank = 0;
  std::uint32_t page_size = 0;
  std::vector<BufferPlace> buffers;
  std::vector<AuxField> aux;
};

class Pool {
 public:
  /// Validates the layout against the descriptors (size, no overflow, memfds must be sealed against shrinking
  /// so that no later truncation can SIGBUS the daemon), maps them read-write and populates the pages.
  /// Errors name buffer, field and both values.
  static Result<std::shared_ptr<Pool>> map(PoolLayout layout, std::vector<UniqueFd> fds);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  const PoolLayout& layout() const { return layout_; }
  std::uint32_t page_size() const { return layout_.page_size; }
  RankIndex rank() const { return layout_.rank; }
  std::span<std::byte> buffer(std::uint32_t index) const { return buffers_[index]; }
  std::uint32_t buffer_count() const { return static_cast<std::uint32_t>(buffers_.size()); }
  /// For a process that writes this memory on its own: tells the owner so (see writer_lock.h) until the Pool,
  /// and with it the mapping, is gone.
  Result<void> lock_for_writing();
  /// Row `slot` of aux field `index`.
  std::span<std::byte> aux_row(std::uint32_t index, std::uint32_t slot) const;
  /// The mapped descriptors, for handing the same memory to a peer on this host. Owned by the Pool.
  const std::vector<UniqueFd>& fds() const { return fds_; }
  std::uint64_t mapped_bytes() const;

 private:
  struct Mapping {
    std::byte* base = nullptr;
    std::uint64_t bytes = 0;
  };
  Pool() = default;

  PoolLayout layout_;
  std::vector<UniqueFd> fds_;
  std::vector<Mapping> mappings_;
  std::vector<std::span<std::byte>> buffers_;
  std::vector<std::span<std::byte>> aux_;
  std::optional<WriterLock> writing_;
};

/// Smallest page count over the layout's buffers of one space (draft buffers count as tokens: the same
/// pages); the number of pages an engine may name. 0 when there are none.
std::uint64_t page_count(const PoolLayout& layout, RowSpace space = RowSpace::kTokens);
std::vector<BufferShape> shapes(const PoolLayout& layout);
/// Fills in every buffer's space.
void set_spaces(const ModelGeometry& model, PoolLayout& layout);

}  // namespace kvferry
