#pragma once
// Whole fleets in one thread and in virtual time: prefill and decode daemons made of the real room machines,
// the real control codec and the real planner; engines that attach, send, expect, abort, die and come back;
// connections that stall, break and are made anew. After every event the invariants of the design are checked
// against a shadow that knows the owner of every page.

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "common/control/link.h"
#include "decode/rooms.h"
#include "prefill/rooms.h"
#include "tests/sim/faults.h"
#include "tests/sim/shadow.h"
#include "tests/sim/wire.h"

namespace kvferry::sim {

// Deadlines of the simulated daemons: short, so that a run sees many of them pass.
inline constexpr std::chrono::nanoseconds kBootstrap = std::chrono::milliseconds(400);
inline constexpr std::chrono::nanoseconds kTransfer = std::chrono::milliseconds(400);
inline constexpr std::chrono::nanoseconds kDrain = std::chrono::milliseconds(100);
inline constexpr std::chrono::nanoseconds kSilence = std::chrono::milliseconds(100);
inline constexpr Nanos kHeartbeat = 20 * kMilli;
inline constexpr Nanos kRetry = 10 * kMilli;
inline constexpr decode::ServiceId kService = 1;  // there is one

struct Spec {
  std::uint64_t seed = 1;
  ModelGeometry model;
  Topology prefill;
  Topology decode;
  std::uint32_t page_size = 2;
  std::uint64_t pages = 48;  // per rank and side
  std::uint32_t prefill_daemons = 1;
  std::uint32_t decode_daemons = 1;
  Reach reach = Reach::kPlaced;
  std::uint32_t uses = 24;
  bool hurry = false;          // a room is used again in the moment it has ended
  std::uint32_t room_ids = 5;  // few, so that every room is used again and again
  std::uint32_t jobs_per_peer_max = 8;
  VerifyRate verify = kVerifyOff;
  Nanos busy = 600 * kMilli;  // faults and new rooms; then only the ends
};
Spec random_spec(std::uint64_t seed);
std::string describe(const Spec& spec);

struct Outcome {
  std::vector<std::string> violations;  // the first few
  std::uint64_t hash = 0;
  std::uint64_t events = 0;
  std::uint64_t landed = 0;  // engine ends, by kind
  std::uint64_t failed = 0;
  std::uint64_t aborted = 0;
  std::uint64_t bytes = 0;
  std::uint64_t stale = 0;
  std::uint64_t flipped = 0;  // bytes
  std::uint64_t caught = 0;   // rooms that ended for wrong bytes
};

class World {
 public:
  World(Spec spec, std::vector<Fault> faults);
  Outcome run();

 private:
  struct Session;
  struct Daemon {  // what both sides have in common
    bool prefill = false;
    std::uint32_t index = 0;
    bool alive = true;
    std::uint64_t life = 1;
    Nanos jumped = 0;  // ahead of everybody else's clock
    PeerId next_peer = 1;
    std::map<PeerId, std::shared_ptr<Session>> sessions;
    std::vector<RankIndex> ranks;
    std::deque<FabricEvent> events;
  };
  struct PrefillDaemon : Daemon {
    std::unique_ptr<prefill::Rooms> rooms;
  };
  struct DecodeDaemon : Daemon {
    std::unique_ptr<decode::Rooms> rooms;
    bool ready = false;  // the service is
    Nanos retry_at = 0;
    std::set<std::uint32_t> dialing;  // prefill daemons
    std::set<PeerId> up;              // whose fabric is, or was until its end is heard
  };
  struct End {  // of a session, on one side
    PeerId peer = 0;
    std::optional<ControlLink> link;
    bool open = false;
    bool up = false;
    bool fabric_ended = false;  // before it was up
    Nanos last_arrival = 0;     // of what it sends
    Nanos stalled_until = 0;
    std::optional<FaultKind> spoil;  // what happens to the next message
    std::string held;                // the message that waits to be overtaken
  };
  struct Session {
    PrefillDaemon* prefill = nullptr;
    DecodeDaemon* decode = nullptr;
    std::uint64_t decode_life = 0;
    End at_prefill;
    End at_decode;
    std::shared_ptr<Wire> wire;
  };
  struct Cable {
    std::shared_ptr<Wire> wire;
    std::uint32_t prefill = 0;  // daemons
    std::uint32_t decode = 0;
  };
  enum class Fate { kNone, kLanded, kFailed, kAborted, kSkipped };
  struct Use {  // one use of a room by both sides
    std::uint64_t number = 0;
    Room room = 0;
    std::uint64_t prefix = 0;
    std::uint64_t tokens = 0;
    bool aux = true;
    bool touched = false;  // it may end without landing
    bool haunted = false;  // by an earlier use of the room that not everybody heard of
    std::vector<std::uint64_t> cuts;
    std::uint32_t layer_group = 0;  // layers that go at once; 0: all
    std::set<RankIndex> granted;    // decode ranks
    std::map<RankIndex, Fate> prefill;
    std::map<RankIndex, Fate> decode;

    std::uint64_t first_of(std::size_t cut) const { return cut == 0 ? prefix : cuts[cut - 1]; }
  };
  struct HeldChunk {
    std::vector<std::uint32_t> pages;
    std::set<std::uint32_t> unread;  // its groups of layers, by their end
  };
  struct Held {
    std::shared_ptr<Use> use;
    std::vector<std::uint32_t> pages;           // decode
    std::map<std::uint64_t, HeldChunk> chunks;  // prefill: of unfinished chunks, by first token
  };
  struct Piece {  // of what a prefill rank sends of a use: a group of the layers of a chunk
    std::size_t cut = 0;
    Interval layers;  // {0, 0}: all
  };
  struct Engine {
    bool prefill = false;
    RankIndex rank = 0;
    bool alive = true;
    std::uint64_t life = 1;
    EngineId id = 0;  // 0: not attached
    std::shared_ptr<Pool> pool;
    std::vector<std::uint32_t> free;
    std::map<Room, Held> held;
    Nanos drought_until = 0;
    Nanos last_event = 0;
    std::multiset<Room> limbo;  // rooms whose pages and aux slots wait for a dead daemon's writers
  };

  // world.cc: the run, and faults
  void start_use(Room room);
  void next_uses();
  static bool any(const std::map<RankIndex, Fate>& fates, Fate fate);
  static bool all(const std::map<RankIndex, Fate>& fates, Fate fate);
  static bool ended(const Use& use);
  std::shared_ptr<Use> new_use(Room room, std::uint64_t tokens, bool aux);
  void inject(const Fault& fault);
  void tick(Daemon& daemon);

  // world_engines.cc
  void new_engine(Engine& engine);
  void attach(Engine& engine);
  void engine_dies(Engine& engine, Nanos down);
  void expect(Engine& engine, const std::shared_ptr<Use>& use, int tries);
  std::vector<Piece> pieces_of(const Engine& engine, const Use& use) const;
  void send_next(Engine& engine, const std::shared_ptr<Use>& use, std::size_t piece, int tries);
  void compute(Engine& engine, const Use& use, const std::vector<std::uint32_t>& pages, const Piece& piece);
  void pass_fence(Engine& engine, std::uint64_t life, const std::shared_ptr<Use>& use,
                  const std::vector<std::uint32_t>& pages, const Piece& piece, std::uint64_t fence);
  void abort_room(Engine& engine, Room room);
  void deliver(Engine& engine, const EngineEvent& event);
  void end(Engine& engine, Room room, Fate fate, const std::string& why);
  void give_back(Engine& engine, Held held);
  void lost_daemon(Engine& engine);
  void release_when_quiet(Engine& engine, Held held);
  void skip(Engine& engine, const std::shared_ptr<Use>& use);
  std::optional<std::vector<std::uint32_t>> take(Engine& engine, std::uint64_t count);

  // world_daemons.cc
  void boot(PrefillDaemon& daemon);
  void boot(DecodeDaemon& daemon);
  void crash(Daemon& daemon, Nanos down);
  void perform(PrefillDaemon& daemon, prefill::Actions& actions);
  void perform(DecodeDaemon& daemon, decode::Actions& actions);
  void on_fabric(PrefillDaemon& daemon, const FabricEvent& event);
  void on_fabric(DecodeDaemon& daemon, const FabricEvent& event);
  static std::shared_ptr<Session> session_of(const Daemon& daemon, PeerId peer);  // null: lost
  void queue_event(Daemon& daemon, FabricEvent&& event);
  void tell(bool prefill_side, EngineId id, EngineEvent event);

  // world_sessions.cc
  void dial(DecodeDaemon& decode, PrefillDaemon& prefill);
  void establish(DecodeDaemon& decode, PrefillDaemon& prefill);
  void fabric_up(const std::shared_ptr<Session>& session);
  void check_service(DecodeDaemon& daemon);
  void say(const std::shared_ptr<Session>& session, bool from_prefill, const ControlMessage& message);
  void transmit(const std::shared_ptr<Session>& session, bool from_prefill, std::string bytes);
  void hear(const std::shared_ptr<Session>& session, bool at_prefill, const std::string& bytes);
  void lose(const std::shared_ptr<Session>& session, bool at_prefill, const Error& why);
  void close_later(const std::shared_ptr<Session>& session, bool at_prefill);

  // world_checks.cc
  void check_pages();
  void check_bytes(const Engine& engine, const Held& held);
  void check_delivered(const Engine& engine, const Use& use);
  std::string unfinished() const;
  void violation(std::string text);
  Nanos clock(const Daemon& daemon) const { return time_.now() + daemon.jumped; }
  Daemon& daemon_of(const Engine& engine);
  static int aux_slot(const Use& use) { return use.aux ? static_cast<int>(use.room % kAuxSlots) : -1; }
  Nanos random_delay(Nanos most) {
    return static_cast<Nanos>(rng_.below(static_cast<std::uint64_t>(most) + 1));
  }

  Spec spec_;
  std::vector<Fault> faults_;
  Schedule time_;
  Trace trace_;
  test::Rng rng_;
  bool disturbed_ = false;  // some fault of this run may end rooms that nobody aborted
  bool quiet_ = false;      // the faults are over
  std::vector<std::unique_ptr<PrefillDaemon>> prefills_;
  std::vector<std::unique_ptr<DecodeDaemon>> decodes_;
  std::map<RankIndex, Engine> prefill_engines_;
  std::map<RankIndex, Engine> decode_engines_;
  std::map<Room, std::shared_ptr<Use>> uses_;  // the latest use of each room
  Shadow shadow_;
  std::vector<Cable> wires_;  // all there ever were
  EngineId next_engine_ = 1;
  std::uint64_t next_use_ = 1;
  std::uint64_t next_fence_ = 1;
  std::uint32_t uses_left_ = 0;
  std::uint64_t flips_ = 0;  // bytes that the network will change
  std::set<Room> flipped_;   // rooms whose bytes it has changed
  Outcome outcome_;
};

/// random_spec(seed) with the faults of the seed.
Outcome run_seed(std::uint64_t seed);
std::vector<Fault> faults_of(const Spec& spec);
/// The smallest set of these faults, as far as leaving out halves, quarters and so on finds it, with which
/// the world still goes wrong.
std::vector<Fault> shortest(const Spec& spec, std::vector<Fault> faults);

}  // namespace kvferry::sim
