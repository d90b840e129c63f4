#pragma once
// The prefill side of every room: a pure state machine. It takes (now, event) and appends actions; it holds
// no socket, no clock and no thread, so tests and the simulator drive it directly.
//
// One entry per (room, local prefill rank). Chunks come from the engine, destinations (grants) from decode
// daemons, in any order. A destination that sends: chunks are planned and posted in order as both sides
// allow. A chunk has all layers of its tokens, or a group of them; the groups of the same tokens follow each
// other (rooms_order.cc).
//
//        send / grant            all destinations landed, last chunk seen
//   (none) ----------> alive ------------------------------------------> landed
//                        | failure (first reason wins), abort, stop, peer or engine lost, deadline
//                        v
//                     ending --- every destination drained ---> failed | aborted
//
// The rule callers must keep: perform the actions in order, and report what the fabric says about them.

#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <variant>
#include <vector>

#include "common/control/messages.h"
#include "common/daemon/report.h"
#include "common/engine/server.h"
#include "common/plan/plan.h"
#include "common/pool/pool.h"
#include "common/topology/rank_map.h"
#include "common/verify/digest.h"
#include "transport/fabric.h"

namespace kvferry::prefill {

struct PostChunk {
  PeerId peer;
  ChunkJob job;
};
struct DigestChunk {  // read the digest, then call digest_done()
  TransferKey key;
  std::size_t chunk = 0;
  std::shared_ptr<const DigestTask> task;
};
struct CancelTransfer {
  PeerId peer;
  TransferKey key;
};
struct FencePeer {  // destroy its connections; the fabric's PeerDown must follow
  PeerId peer;
  Error reason;
};
struct SendMessage {
  PeerId peer;
  ControlMessage message;
};
struct TellEngine {
  EngineId engine;
  EngineEvent event;
};
using Action =
    std::variant<PostChunk, DigestChunk, CancelTransfer, FencePeer, SendMessage, TellEngine, TransferReport>;
using Actions = std::vector<Action>;

struct RoomsOptions {
  ModelGeometry model;
  Topology topology;
  std::chrono::nanoseconds bootstrap{std::chrono::seconds(300)};  // creation to both sides present
  std::chrono::nanoseconds transfer{std::chrono::seconds(300)};   // longest time without progress
  std::chrono::nanoseconds drain{std::chrono::seconds(30)};       // stop to drained, then the peer is fenced
  std::uint32_t rooms_max = 4096;
  std::uint32_t chunks_per_room_max = 4096;
  std::uint32_t jobs_per_peer_max = 4096;  // posted and not done; more wait here, in the order they came
  std::function<Nanos()> stopwatch;        // measures planning, for statistics only; may be empty
};

/// The source row of each aux field at the moment the last chunk was sent.
struct AuxBytes {
  std::string name;
  std::vector<std::byte> bytes;
};

class Rooms {
 public:
  explicit Rooms(RoomsOptions options);

  // Engines. Errors refuse that one call and change nothing.
  Result<void> attach(EngineId engine, RankIndex rank, std::shared_ptr<const Pool> pool);
  /// `fence` not 0: the chunk is posted only after chunk_ready() with that number, which is never used again
  /// (a room that ended and began anew may have a chunk at the same place). chunk.ready is not looked at.
  Result<void> send(Nanos now, EngineId engine, EngineChunk chunk, std::uint64_t fence,
                    std::vector<AuxBytes> aux, Actions& out);
  Result<void> abort(Nanos now, EngineId engine, const EngineAbort& abort, Actions& out);
  void engine_gone(Nanos now, EngineId engine, Actions& out);
  /// The fence of a chunk of the room has passed.
  void chunk_ready(Nanos now, EngineId engine, Room room, std::uint64_t fence, Actions& out);

  void digest_done(Nanos now, const TransferKey& key, std::size_t chunk, const Digest& digest, Actions& out);

  // Peers (decode daemons).
  void peer_connected(PeerId peer, std::string instance, Topology topology);
  void peer_ready(Nanos now, PeerId peer, Actions& out);  // its fabric is up
  void peer_lost(Nanos now, PeerId peer, const Error& error, Actions& out);
  void on_message(Nanos now, PeerId peer, const ControlMessage& message, Actions& out);

  void on_fabric(Nanos now, const FabricEvent& event, Actions& out);
  void tick(Nanos now, Actions& out);

  // Observers.
  struct Stats {
    std::uint64_t rooms = 0;              // alive or ending
    std::uint64_t waiting = 0;            // one side missing
    std::uint64_t live_pages = 0;         // engine pages held for rooms alive
    std::uint64_t quarantined_pages = 0;  // held by rooms that end but are not drained
    std::uint64_t stale_messages = 0;
  };
  Stats stats() const;
  bool rank_attached(RankIndex rank) const { return ranks_.contains(rank); }
  std::optional<RankIndex> rank_of(EngineId engine) const;

 private:
  struct RoomKey {
    Room room;
    RankIndex rank;
    friend auto operator<=>(const RoomKey&, const RoomKey&) = default;
  };
  struct Chunk {
    std::shared_ptr<const std::vector<std::uint32_t>> pages;  // one list for all chunks of the same tokens
    std::uint64_t first = 0;
    std::uint64_t count = 0;
    std::uint32_t layer_begin = 0;  // both 0: all layers
    std::uint32_t layer_end = 0;
    bool last = false;
    std::uint64_t fence = 0;      // 0: its rows may be read
    std::uint32_t read_by = 0;    // destinations that need it no longer
    std::uint32_t digesting = 0;  // digests that still read its rows
    bool reported = false;
    HybridRows hybrid = {};  // of the last chunk

    /// Whether the buffers of this part and layer go with the chunk: windows and state go with the last one.
    bool carries(RowSpace space, std::uint32_t layer) const;
  };
  struct Destination {
    PeerId peer = 0;
    GrantKey key;
    std::shared_ptr<const std::vector<std::uint32_t>> pages;
    std::uint64_t prefix = 0;
    std::uint64_t tokens = 0;
    bool has_aux = false;
    std::uint32_t aux_slot = 0;
    HybridRows hybrid = {};
    std::shared_ptr<const std::vector<PairLayout>> layouts;  // set with the first chunk
    std::shared_ptr<const message::RankUp> remote;           // likewise
    VerifyRate verify = kVerifyOff;
    Digest digest;             // of the chunks so far
    std::size_t digested = 0;  // chunks
    bool digest_sent = false;
    bool sends = false;
    bool sends_aux = false;
    std::size_t next_chunk = 0;
    std::uint32_t in_flight = 0;
    bool waits = false;  // in its peer's `waiting`
    bool posted_any = false;
    bool landed = false;
    bool drained = false;  // also true when nothing was ever posted and the room ends
    Nanos cancel_at = 0;   // 0: not cancelled
    Nanos granted = 0;
    TransferReport report;
    Nanos first_post = 0;
    Nanos last_done = 0;
  };
  struct Entry {
    EngineId engine = 0;  // 0: only grants so far
    std::shared_ptr<const Pool> pool;
    std::deque<Chunk> chunks;
    std::size_t first_unread = 0;  // all chunks before it have been reported as read
    std::uint64_t next_token = 0;  // where the tokens of the last chunk end, or begin while layers miss
    std::uint32_t next_layer = 0;  // of the last chunk's tokens; 0: they have all layers
    bool last_seen = false;
    std::vector<AuxBytes> aux;
    std::map<RankIndex, Destination> destinations;
    std::optional<std::vector<RankIndex>> expected;
    std::string instance;  // decode service of the first grant
    bool granted_told = false;
    Nanos created = 0;
    Nanos progress = 0;
    std::optional<Error> failure;
    std::vector<GrantKey> refused;  // grants that came after the failure
    std::uint64_t page_count = 0;
  };
  struct Peer {
    std::string instance;
    Topology topology;
    bool ready = false;
    bool lost = false;
    std::uint32_t in_flight = 0;  // jobs that the fabric has
    std::deque<RoomKey> waiting;  // rooms with a chunk that found in_flight at its limit, each once
    std::map<RankIndex, std::shared_ptr<const message::RankUp>> ranks;
    std::map<std::pair<RankIndex, RankIndex>, std::shared_ptr<const std::vector<PairLayout>>> layouts;
  };
  struct Tombstone {  // the last use of a room that ended: whoever comes late to it is told why, once
    std::optional<Error> error{};   // why the use did not land
    bool engine_heard = false;      // the engine took part in it or has been told
    std::vector<GrantKey> heard{};  // grants of decode ranks that took part or have been told
    Nanos expires = 0;
  };
  struct LocalRank {
    EngineId engine = 0;
    std::shared_ptr<const Pool> pool;
    std::vector<std::uint32_t> layers;  // that have a buffer, ascending

    std::uint32_t layers_end() const { return layers.back() + 1; }
    bool completes(const EngineChunk& chunk) const {
      return chunk.all_layers() || chunk.layer_end == layers_end();
    }
  };
  using Entries = std::map<RoomKey, Entry>;

  Result<void> check_chunk(const EngineChunk& chunk, const LocalRank& local) const;
  static Result<void> check_layers(const EngineChunk& chunk, const LocalRank& local);
  Result<void> check_order(const Entry& entry, const EngineChunk& chunk, const LocalRank& local) const;
  static Result<void> check_first_layers(const EngineChunk& chunk, const LocalRank& local);
  static Result<void> check_next_layers(const Entry& entry, const EngineChunk& chunk);
  void on_grant(Nanos now, PeerId peer, const message::Grant& grant, Actions& out);
  Result<void> add_destination(Nanos now, PeerId peer, const message::Grant& grant, RankIndex rank);
  Result<void> bind_layout(RankIndex rank, Destination& to);
  void on_stop(Nanos now, PeerId peer, const message::Stop& stop, Actions& out);
  void on_landed(Nanos now, PeerId peer, const message::Landed& landed, Actions& out);
  void pump(Nanos now, const RoomKey& key, Entry& entry, Actions& out);
  Result<void> post_chunk(Nanos now, const RoomKey& key, Entry& entry, Destination& to, Actions& out);
  Result<std::vector<std::shared_ptr<const Plan>>> plan_chunk_parts(const Entry& entry, const Chunk& chunk,
                                                                    const Destination& to, Room room) const;
  void digest_chunk(const RoomKey& key, Entry& entry, Destination& to, Actions& out) const;
  void send_digest(const RoomKey& key, const Entry& entry, Destination& to, Actions& out) const;
  void tell_read(const RoomKey& key, Entry& entry, Actions& out);
  std::vector<AuxWrite> aux_writes(const Entry& entry, const Destination& to) const;
  void chunk_read(const RoomKey& key, Entry& entry, std::size_t index, Actions& out);
  void jobs_done(Nanos now, PeerId id, std::uint32_t jobs, Actions& out);
  void begin_end(Nanos now, const RoomKey& key, Entry& entry, Error error, Actions& out);
  void settle(Nanos now, const RoomKey& key, Actions& out);
  void finish(Nanos now, Entries::iterator at, Actions& out);
  void bury(const RoomKey& key, Tombstone tombstone);
  void report(const Entry& entry, const Destination& to, Nanos now, Actions& out) const;
  bool complete(const Entry& entry) const;

  RoomsOptions options_;
  std::shared_ptr<const ModelGeometry> model_;
  Entries entries_;
  std::map<RankIndex, LocalRank> ranks_;
  std::map<EngineId, RankIndex> engines_;
  std::map<PeerId, Peer> peers_;
  std::map<RoomKey, Tombstone> tombstones_;
  std::deque<RoomKey> tombstone_order_;
  std::uint64_t stale_messages_ = 0;
};

}  // namespace kvferry::prefill
