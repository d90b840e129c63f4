#pragma once
// A fabric moves the bytes of plans from prefill pools into decode pools. Each fabric has two ends:
// SendFabric in the prefill daemon, ReceiveFabric in the decode daemon. Rules that every backend keeps:
//
//  * Every call returns at once and never blocks on a peer. What goes wrong comes back as an event.
//  * Events arrive through the sink, on a thread of the fabric (or, for inproc, inside step()); the sink must
//    only hand them over. No event is delivered after the object's destructor returned.
//  * The notice of a transfer follows its bytes: Landed is reported only when all bytes that the source
//  counted
//    are visible in the destination pool.
//  * After Drained/GrantClosed/Fenced nothing posted before can land any more; only then may pages be reused.
//  * No byte from a peer can abort the process or touch memory outside the pages granted to that transfer.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "common/base/error.h"
#include "common/base/ids.h"
#include "common/plan/plan.h"
#include "common/pool/pool.h"

namespace kvferry {

/// Steady-clock nanoseconds; only differences mean something.
using Nanos = std::int64_t;

enum class FabricKind : std::uint8_t { kInproc, kShm, kTcp, kUcx };
std::string_view to_string(FabricKind kind);  // "inproc", "shm", "tcp", "ucx"
Result<FabricKind> parse_fabric_kind(std::string_view text);

/// One aux field's bytes for the destination's aux slot, copied from the source row when the chunk was
/// posted.
struct AuxWrite {
  std::uint32_t dst_field = 0;
  std::vector<std::byte> bytes;  // at most the destination field's width
};

/// One chunk of one transfer, ready to be read (its fence has passed).
struct ChunkJob {
  TransferKey key;
  std::shared_ptr<const Plan> plan;  // may have no runs
  std::shared_ptr<const Pool> source;
  std::vector<AuxWrite> aux;   // only with `last`
  std::uint32_t aux_slot = 0;  // the destination's slot, from its grant
  bool last = false;           // the notice follows this chunk
  std::uint64_t ticket = 0;    // comes back in ChunkDone
};

/// What a decode rank granted: the destination of all transfers of one room into one decode rank.
struct Grant {
  GrantKey key;
  using Pages = std::shared_ptr<const std::vector<std::uint32_t>>;
  Pages pages;         // physical, in the order of the room's tokens; the draft model's too
  Pages window_pages;  // of the sliding-window layers; null where there are none
  Pages state_slot;    // one entry: the row of the recurrent state; null where there is none
  bool has_aux = false;
  std::uint32_t aux_slot = 0;
  std::vector<std::pair<RankIndex, PeerId>> sources;  // who may write, through which peer

  const Pages& pages_of(RowSpace space) const {
    return space == RowSpace::kWindow ? window_pages : space == RowSpace::kState ? state_slot : pages;
  }
};

/// Opaque per-session connection data that the decode daemon puts into its handshake (JSON text made by
/// ReceiveFabric::offer) and the prefill daemon hands to SendFabric::connect.
struct FabricOffer {
  FabricKind kind = FabricKind::kTcp;
  std::string json;
};

namespace fabric_event {
struct PeerUp {  // send side: connected; `carries` names what really moves the bytes, e.g. "tcp 4x"
  PeerId peer;
  std::string carries;
};
struct PeerDown {  // either side: the connection is gone, nothing of this peer can land any more
  PeerId peer;
  Error error;
};
struct ChunkDone {  // send side: source pages of this chunk may be reused
  PeerId peer;
  TransferKey key;
  std::uint64_t ticket;
  std::uint64_t bytes;   // on the wire, payload only
  std::uint64_t writes;  // blocks, puts or copies posted
  Nanos first_post;
  Nanos last_done;
  Nanos pack;  // time spent gathering into staging, summed
};
struct ChunkFailed {  // send side: the transfer cannot complete
  PeerId peer;
  TransferKey key;
  std::uint64_t ticket;
  Error error;
};
struct Drained {  // send side, answer to cancel(): nothing of this transfer can land any more
  PeerId peer;
  TransferKey key;
};
struct Landed {  // receive side: one source has delivered everything, `bytes` of KV and aux
  PeerId peer;
  TransferKey key;
  std::uint64_t bytes;
};
struct GrantClosed {  // receive side, answer to close()
  GrantKey key;
};
struct Rejected {  // receive side: a peer's block was refused; counted, never fatal to the process
  PeerId peer;     // 0 when it is not a known peer
  Error error;
};
}  // namespace fabric_event

using FabricEvent = std::variant<fabric_event::PeerUp, fabric_event::PeerDown, fabric_event::ChunkDone,
                                 fabric_event::ChunkFailed, fabric_event::Drained, fabric_event::Landed,
                                 fabric_event::GrantClosed, fabric_event::Rejected>;
using FabricSink = std::function<void(FabricEvent&&)>;

class SendFabric {
 public:
  virtual ~SendFabric() = default;
  virtual FabricKind kind() const = 0;
  /// Starts connecting; PeerUp or PeerDown follows exactly once, PeerDown later again only after PeerUp.
  virtual void connect(PeerId peer, const FabricOffer& offer) = 0;
  /// Queues a chunk. Chunks of one transfer complete in order. ChunkDone or ChunkFailed follows, unless the
  /// transfer is cancelled (then Drained) or the peer goes down (then PeerDown).
  virtual void post(PeerId peer, ChunkJob job) = 0;
  /// Stops posting for `key`; Drained follows, also for a transfer that is unknown here.
  virtual void cancel(PeerId peer, const TransferKey& key) = 0;
  /// Destroys the connection so that nothing can land any more; PeerDown follows. Unknown peers are ignored.
  virtual void fence(PeerId peer) = 0;
};

class ReceiveFabric {
 public:
  virtual ~ReceiveFabric() = default;
  virtual FabricKind kind() const = 0;
  /// True when close() alone guarantees that nothing can land (the receiver places every byte). False for
  /// one-sided writers (shm, puts): there the source's drain, or a fence, must come first.
  virtual bool receiver_places_bytes() const = 0;
  /// Makes a pool a legal destination; replaces an earlier pool of the same rank.
  virtual void add_pool(std::shared_ptr<const Pool> pool) = 0;
  virtual void remove_pool(RankIndex rank) = 0;
  /// Admits one peer and returns what it needs to connect (address and a random 128-bit token, single
  /// session).
  virtual Result<FabricOffer> offer(PeerId peer) = 0;
  virtual void open(Grant grant) = 0;
  /// Stops accepting for `key`; GrantClosed follows, also for an unknown key.
  virtual void close(const GrantKey& key) = 0;
  /// Destroys the peer's connection and forgets its token; PeerDown follows if it was connected.
  virtual void fence(PeerId peer) = 0;
};

}  // namespace kvferry
