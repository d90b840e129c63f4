#pragma once
// The receiver's check: which blocks may be placed, where exactly, and when a source has delivered all.
// Pure and single-threaded: no socket, no clock, no lock; the fabric's thread owns it. It hands out only
// memory inside the pages granted to that very transfer, whatever the header says.
//
// For each block:   admit() -> the caller fills the Placement with the payload -> arrived()
// For each notice:  notice()
// Landed comes back exactly once per source, from whichever call completes the count, in any order of blocks
// and notice.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "common/base/error.h"
#include "common/base/ids.h"
#include "common/base/result.h"
#include "common/pool/pool.h"
#include "transport/block.h"
#include "transport/fabric.h"

namespace kvferry {

/// Where the payload of one admitted block goes: a cursor over contiguous destination spans, in payload
/// order, with O(1) state. Rows that follow each other in memory (also across consecutive physical pages)
/// come as one span. Keeps the pool mapped for as long as it lives.
class Placement {
 public:
  Placement() = default;
  /// The next span, or an empty one at the end. Never empty before the end.
  std::span<std::byte> next();
  /// Payload bytes that next() has not handed out yet.
  std::uint64_t bytes_left() const { return bytes_left_; }

 private:
  friend class GrantTable;
  std::byte* row_address(std::uint64_t index) const;

  std::shared_ptr<const Pool> pool_;
  std::shared_ptr<const std::vector<std::uint32_t>> pages_;
  std::byte* base_ = nullptr;  // of the buffer, or of the aux row
  std::uint64_t stride_ = 0;   // bytes per destination row
  std::uint32_t page_rows_ = 0;
  std::uint32_t pitch_ = 0;
  BlockHeader header_;
  std::uint64_t bytes_left_ = 0;
  std::uint32_t piece_ = 0;
  std::uint32_t row_ = 0;  // within the piece
};

/// Why a block is not placed. `discard`: it names a grant that is unknown or closed (late bytes of a
/// cancelled transfer are normal); read past its payload and count it. Otherwise the peer broke the rules.
struct Refusal {
  bool discard = false;
  Error error;
};

template <class T>
using Admission = tl::expected<T, Refusal>;

class GrantTable {
 public:
  void add_pool(std::shared_ptr<const Pool> pool);
  /// Grants into the pool stay known but admit nothing more.
  void remove_pool(RankIndex rank);
  std::shared_ptr<const Pool> pool(RankIndex rank) const;

  /// Refuses a grant whose rank has no pool here, that names a page or aux slot outside the pool or a source
  /// twice, or whose key is open already.
  Result<void> open(Grant grant);
  /// True when it was open.
  bool close(const GrantKey& key);
  bool is_open(const GrantKey& key) const { return grants_.contains(key); }
  std::size_t open_count() const { return grants_.size(); }

  /// For kRows and kAux headers that decode_block() accepted. Counts the payload as under way.
  Admission<Placement> admit(const BlockHeader& header, PeerId peer);
  /// All payload bytes of an admitted block are in place.
  Admission<std::optional<fabric_event::Landed>> arrived(const BlockHeader& header, PeerId peer);
  /// For kNotice headers. A second notice, or one that announces less than was sent already, is a violation.
  Admission<std::optional<fabric_event::Landed>> notice(const BlockHeader& header, PeerId peer);

 private:
  struct Source {
    RankIndex rank = 0;
    PeerId peer = 0;
    std::uint64_t admitted_bytes = 0;
    std::uint64_t admitted_blocks = 0;
    std::uint64_t arrived_bytes = 0;
    std::uint64_t arrived_blocks = 0;
    std::uint64_t total_bytes = 0;
    std::uint64_t total_blocks = 0;
    bool noticed = false;
    bool landed = false;
  };
  struct Entry {
    std::shared_ptr<const Pool> pool;
    Grant grant;
    std::vector<Source> sources;  // of the grant, with what each has delivered
  };
  struct Found {
    Entry* entry = nullptr;
    Source* source = nullptr;
  };

  Admission<Found> find(const BlockHeader& header, PeerId peer);
  static std::optional<fabric_event::Landed> landed_now(Source& source, const BlockHeader& header);

  std::unordered_map<RankIndex, std::shared_ptr<const Pool>> pools_;
  std::unordered_map<GrantKey, Entry> grants_;
};

}  // namespace kvferry
