#pragma once
// The decode side of every room: a pure state machine, (now, event) -> actions, like prefill/rooms.h. One
// entry per (room, local decode rank).
//
//         expect              service, peers and dp rank known        every source landed
//   (none) -----> waiting -----------------------------> granted ---------------------------> landed
//                    | failure (first reason wins), abort, refused, peer or engine lost, deadline
//                    v
//                 ending --- grant closed, every one-sided source drained or fenced ---> failed | aborted
//
// Pages belong to the entry until its final event; nothing can land in them after it.

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "common/control/messages.h"
#include "common/daemon/report.h"
#include "common/engine/server.h"
#include "common/pool/pool.h"
#include "common/topology/rank_map.h"
#include "transport/fabric.h"

namespace kvferry::decode {

/// One prefill service (a bootstrap address). Local, never on the wire.
using ServiceId = std::uint32_t;

struct OpenGrant {  // on the receive fabric of every source's peer
  Grant grant;
};
struct VerifyRoom {  // every source has landed: read the digest of what lies in the pool, then digest_done()
  GrantKey key;
  std::shared_ptr<const DigestTask> task;
};
struct CloseGrant {  // on the same fabrics; one GrantClosed event each must follow
  GrantKey key;
  std::vector<PeerId> peers;
};
struct FencePeer {
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
struct ResolveDpRank {  // ask the bootstrap server which prefill DP rank serves the room
  ServiceId service;
  Room room;
};
struct ReleasePool {  // the engine is gone and nothing can land in its pool any more
  RankIndex rank;
};
using Action = std::variant<OpenGrant, VerifyRoom, CloseGrant, FencePeer, SendMessage, TellEngine,
                            ResolveDpRank, ReleasePool, TransferReport>;
using Actions = std::vector<Action>;

struct RoomsOptions {
  ModelGeometry model;
  Topology topology;
  std::chrono::nanoseconds bootstrap{std::chrono::seconds(300)};  // expect to granted
  std::chrono::nanoseconds transfer{std::chrono::seconds(300)};   // granted to landed
  std::chrono::nanoseconds drain{std::chrono::seconds(30)};
  std::uint32_t rooms_max = 4096;
  std::uint32_t pages_per_room_max = 1u << 20;
  VerifyRate verify = kVerifyOff;
  Generation first_generation = 1;
};

/// What is known of a prefill service once its topology has been fetched and accepted.
struct ServiceInfo {
  Topology topology;
  bool follow_bootstrap_room = true;
  std::map<RankIndex, PeerId> peers;  // which daemon serves each prefill rank
};

class Rooms {
 public:
  explicit Rooms(RoomsOptions options);

  // Engines. Errors refuse that one call and change nothing.
  Result<void> attach(EngineId engine, RankIndex rank, std::shared_ptr<const Pool> pool);
  Result<void> expect(Nanos now, EngineId engine, EngineExpectation expectation, ServiceId service,
                      Actions& out);
  Result<void> abort(Nanos now, EngineId engine, const EngineAbort& abort, Actions& out);
  void engine_gone(Nanos now, EngineId engine, Actions& out);

  // Services and peers (prefill daemons).
  void service_ready(Nanos now, ServiceId service, ServiceInfo info, Actions& out);
  /// Not reachable now; rooms keep waiting until their deadline, which will quote `error`.
  void service_unreachable(ServiceId service, Error error);
  /// Refused by the compatibility rules: every waiting room of this service fails at once.
  void service_refused(Nanos now, ServiceId service, const Error& error, Actions& out);
  void dp_rank_resolved(Nanos now, ServiceId service, Room room, std::optional<std::uint32_t> dp,
                        Actions& out);
  /// Connected, and its fabric is up. `receiver_places`: see ReceiveFabric::receiver_places_bytes.
  void peer_ready(Nanos now, PeerId peer, bool receiver_places, Actions& out);
  void peer_lost(Nanos now, PeerId peer, const Error& error, Actions& out);
  void on_message(Nanos now, PeerId peer, const ControlMessage& message, Actions& out);

  void on_fabric(Nanos now, const FabricEvent& event, Actions& out);
  void digest_done(Nanos now, const GrantKey& key, const Digest& lies, Actions& out);
  void tick(Nanos now, Actions& out);

  struct Stats {
    std::uint64_t rooms = 0;
    std::uint64_t waiting = 0;
    std::uint64_t live_pages = 0;
    std::uint64_t quarantined_pages = 0;
    std::uint64_t stale_messages = 0;
  };
  Stats stats() const;
  bool rank_attached(RankIndex rank) const;
  std::optional<RankIndex> rank_of(EngineId engine) const;
  /// Announcement of an attached rank for peers.
  std::vector<message::RankUp> announcements() const;
  /// Services with rooms that wait for them.
  bool service_wanted(ServiceId service) const;

 private:
  struct RoomKey {
    Room room;
    RankIndex rank;
    friend auto operator<=>(const RoomKey&, const RoomKey&) = default;
  };
  struct Source {
    RankIndex rank = 0;
    PeerId peer = 0;
    bool landed = false;
    bool drained = false;
    std::uint64_t bytes = 0;
    std::optional<message::TransferDigest> digest{};
  };
  struct Entry {
    EngineId engine = 0;
    ServiceId service = 0;
    GrantKey key;
    std::shared_ptr<const std::vector<std::uint32_t>> pages;
    HybridRows hybrid = {};
    std::uint64_t prefix = 0;
    std::uint64_t tokens = 0;
    int aux_slot = -1;
    int dp = -1;
    bool dp_asked = false;
    bool granted = false;
    bool told = false;  // nothing to wait for: the engine has its answer, the protocol runs out behind it
    std::map<PeerId, std::vector<RankIndex>> targets;
    std::vector<Source> sources;
    std::uint32_t closes_pending = 0;
    enum class Verify : std::uint8_t { kWaiting, kReading, kDone } verify = Verify::kWaiting;
    Nanos created = 0;
    Nanos granted_at = 0;
    Nanos ending_at = 0;
    std::optional<Error> failure;
  };
  struct Service {
    std::optional<ServiceInfo> info;
    std::optional<Error> last_error;
  };
  struct Peer {
    bool receiver_places = false;
    bool lost = false;
  };
  struct LocalRank {
    EngineId engine = 0;  // 0: gone, pool kept until drained
    std::shared_ptr<const Pool> pool;
    std::vector<Room> page_owner;  // 0: the engine's own
    std::vector<Room> window_owner;
    std::vector<Room> state_owner;
  };
  using Entries = std::map<RoomKey, Entry>;

  Result<void> check(const EngineExpectation& want, const LocalRank& local) const;
  static void own_pages(LocalRank& local, const std::vector<std::uint32_t>& pages, const HybridRows& hybrid,
                        Room owner);
  void try_grant(Nanos now, const RoomKey& key, Entry& entry, Actions& out);
  void begin_end(Nanos now, Entry& entry, Error error, Actions& out);
  void settle(Nanos now, const RoomKey& key, Actions& out);
  void finish(Nanos now, Entries::iterator at, Actions& out);
  void tell(const RoomKey& key, Entry& entry, EngineEvent event, Actions& out);
  void verify(const RoomKey& key, Entry& entry, Actions& out);
  Result<void> check_aux(const RoomKey& key, const Entry& entry) const;
  void release_if_idle(RankIndex rank, Actions& out);
  bool source_quiet(const Source& source) const;
  void for_rooms_of(PeerId peer, std::vector<RoomKey>& out) const;

  RoomsOptions options_;
  std::shared_ptr<const ModelGeometry> model_;
  Entries entries_;
  std::map<RankIndex, LocalRank> ranks_;
  std::map<EngineId, RankIndex> engines_;
  std::map<ServiceId, Service> services_;
  std::map<PeerId, Peer> peers_;
  Generation next_generation_;
  std::uint64_t stale_messages_ = 0;
};

}  // namespace kvferry::decode
