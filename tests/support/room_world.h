#pragma once
// Both room machines, joined by real control codecs and the in-process fabric, with real pools: a small world
// in one thread in which a test decides what happens next. Every landed byte is compared, and pages that went
// back to the decode engine are watched: a byte that changes in them is reported.

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "decode/rooms.h"
#include "prefill/rooms.h"
#include "tests/support/fabric_fixture.h"
#include "tests/support/rng.h"
#include "tests/support/room_memory.h"
#include "transport/inproc/inproc.h"

namespace kvferry::test {

struct WorldSpec {
  ModelGeometry model = small_mla(2);
  ModelGeometry decode_pools = {};  // unlike `model` where it has layers: pools that do not fit
  Topology prefill;
  Topology decode;
  std::uint32_t page_size = 2;
  std::uint64_t pages = 64;  // per rank and side
  bool one_sided = false;    // the receive fabric cannot stop late bytes: only the drain protects pages
  std::uint64_t seed = 1;
  std::uint32_t chunks_per_room_max = 4096;
  std::uint32_t rooms_max = 4096;
  std::uint32_t jobs_per_peer_max = 4096;
  VerifyRate verify = kVerifyOff;
  std::size_t chunks_max = 1 << 16;  // of the fabric's queue
};

class RoomWorld {
 public:
  explicit RoomWorld(WorldSpec spec);
  ~RoomWorld();

  /// A new use of the room: its bytes and its first token differ from those of every earlier use. Where
  /// decode has one PP stage, only ranks of prefill's last stage send that token, the others send another.
  void use(Room room) { use_of_room_[room] = next_use_++; }

  // Engines.
  Result<void> expect(RankIndex rank, Room room, std::uint64_t tokens, std::uint64_t prefix, bool aux = true);
  void expect_all(Room room, std::uint64_t tokens, std::uint64_t prefix = 0, bool aux = true);
  Result<void> send(RankIndex rank, Room room, std::uint64_t first, std::uint64_t count, bool last,
                    bool aux = true);
  /// As send(), but only those layers ({0, 0}: all), whose rows are written now, in the pages of the groups
  /// of the same tokens before it.
  Result<void> send_layers(RankIndex rank, Room room, std::uint64_t first, std::uint64_t count,
                           const Interval& layers, bool last, bool aux = true);
  /// All tokens from `first` on, in chunks of `chunk` tokens, on every prefill rank; each chunk in groups of
  /// `group` layers where that is not 0.
  void send_all(Room room, std::uint64_t tokens, std::uint64_t chunk, std::uint64_t first = 0,
                std::uint32_t group = 0);
  Result<void> abort_decode(RankIndex rank, Room room);
  Result<void> abort_prefill(RankIndex rank, Room room);
  void refuse_service(const Error& error);  // the compatibility rules refuse prefill
  void decode_engine_dies(RankIndex rank);
  void prefill_engine_dies(RankIndex rank);

  // The world's progress.
  void connect();       // service ready, peers ready
  bool step(Rng& rng);  // one random thing; false when nothing is left to do
  void run();           // until nothing is left, oldest first
  void advance(std::chrono::nanoseconds by);
  void lose_connection();  // both sides lose each other

  /// Final events, per (side, rank): "landed 7", "failed 7 peer_lost", ... in order.
  std::vector<std::string> decode_events(RankIndex rank) const;
  std::vector<std::string> prefill_events(RankIndex rank) const;
  /// Chunks that were read: "room 7 tokens 8 layers 4", in order.
  std::vector<std::string> chunks_done(RankIndex rank) const { return prefill_engines_.at(rank).done; }
  /// A hash of the whole pool of a decode rank in the moment of each landing.
  std::vector<std::uint64_t> landed_pools(RankIndex rank) const { return decode_engines_.at(rank).landed; }
  const RoomRank& prefill_rank(RankIndex rank) const { return prefill_engines_.at(rank).rank; }
  std::string last_reason;  // of the last failed or aborted event
  /// Everything the world found wrong so far; empty when nothing is.
  std::vector<std::string> violations;
  std::uint64_t bytes_posted = 0;
  std::uint64_t drains = 0;
  std::map<RankIndex, std::uint64_t> bytes_by_prefill_rank;
  /// What prefill ranks said of what they sent, the latest by (prefill rank, decode rank).
  std::map<std::pair<RankIndex, RankIndex>, Digest> digests;

  prefill::Rooms prefill;
  decode::Rooms decode;

 private:
  struct Use {  // one use of a room on one decode rank
    RoomRows rows;
    Interval tokens;
    int aux_slot = -1;
  };
  struct Engine {
    EngineId id = 0;
    RoomRank rank;
    std::vector<std::uint32_t> free_pages;
    Watch watch;
    std::map<Room, std::vector<std::uint32_t>> held;
    std::map<Room, Use> uses;
    struct Open {  // tokens of which layers are missing
      std::uint64_t first = 0;
      std::vector<std::uint32_t> pages;
    };
    std::map<Room, Open> open;
    std::vector<std::string> events;
    std::vector<std::string> done;
    std::vector<std::uint64_t> landed;
  };
  class OneSided;
  static constexpr decode::ServiceId kService = 1;

  void attach(bool prefill_side, RankIndex rank);
  std::vector<std::uint32_t> take(Engine& engine, std::uint64_t tokens);
  std::vector<std::uint32_t> take_pages(Engine& engine, std::uint64_t count, bool window);
  void take_window(Engine& engine, RoomRows& rows, const Interval& request);
  void give_back(Engine& engine, Room room, bool watch);
  void verify(Engine& engine, Room room);
  void check_watched();
  void perform(prefill::Actions& actions);
  void perform(decode::Actions& actions);
  void deliver_event(bool prefill_side, EngineId engine, const EngineEvent& event);
  Result<void> after(Result<void> result, prefill::Actions& actions);

  WorldSpec spec_;
  Nanos now_ = 1;
  InprocNetwork network_;
  std::unique_ptr<InprocSendFabric> send_fabric_;
  std::unique_ptr<ReceiveFabric> receive_fabric_;
  std::deque<std::string> to_prefill_;
  std::deque<std::string> to_decode_;
  std::deque<FabricEvent> prefill_fabric_events_;
  std::deque<FabricEvent> decode_fabric_events_;
  std::map<RankIndex, Engine> prefill_engines_;
  std::map<RankIndex, Engine> decode_engines_;
  std::map<Room, std::uint64_t> use_of_room_;
  EngineId next_engine_ = 1;
  std::uint64_t next_use_ = 1;
  bool connected_ = false;
};

}  // namespace kvferry::test
