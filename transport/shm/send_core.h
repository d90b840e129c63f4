#pragma once
// The thread behind ShmSendFabric: one epoll over the sessions' sockets and a mailbox. It decides everything;
// the copy crew copies, and a side thread maps and unmaps pools.

#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <thread>
#include <unordered_map>
#include <variant>

#include "transport/shm/channel.h"
#include "transport/shm/copy_crew.h"
#include "transport/shm/mailbox.h"
#include "transport/shm/message.h"
#include "transport/shm/send_fabric.h"
#include "transport/shm/side_thread.h"

namespace kvferry {

class ShmSendFabric::Core {
 public:
  Core(ShmSendOptions options, FabricSink sink);
  ~Core();
  Result<void> start();

  using SessionId = std::uint64_t;
  using LaneId = shm::CopyCrew::LaneId;
  struct Connect {
    PeerId peer;
    FabricOffer offer;
  };
  struct Post {
    PeerId peer;
    ChunkJob job;
  };
  struct Cancel {
    PeerId peer;
    TransferKey key;
  };
  struct Fence {
    PeerId peer;
  };
  struct Finished {  // from the crew
    LaneId lane;
    std::uint64_t ticket;
    Nanos first_post;
    Nanos last_done;
  };
  struct Idle {  // from the crew
    LaneId lane;
  };
  struct Mapped {  // from the side thread
    SessionId session;
    RankIndex rank;
    std::uint64_t serial;
    Result<std::shared_ptr<Pool>> pool;
  };
  struct Released {  // from the side thread
    SessionId session;
  };
  struct Stop {};
  using Command = std::variant<Connect, Post, Cancel, Fence, Finished, Idle, Mapped, Released, Stop>;

  void post(Command command) { mailbox_.post(std::move(command)); }

 private:
  using SteadyTime = std::chrono::steady_clock::time_point;

  struct Job {
    ChunkJob chunk;
    std::uint64_t ticket = 0;  // ours; the caller's own may repeat
    std::shared_ptr<const shm::CopyWork> work;
    bool copied = false;
    Nanos first_post = 0;
    Nanos last_done = 0;
  };
  struct Transfer {
    enum class State : std::uint8_t {
      kRunning,
      kFailing,   // ChunkFailed follows when the slice in progress has ended
      kDraining,  // Drained follows, likewise
    };
    LaneId lane = 0;
    State state = State::kRunning;
    std::deque<Job> jobs;
    std::size_t started = 0;   // jobs at the front that are with the crew or copied
    std::uint64_t serial = 0;  // of the destination pool, from the first chunk that was started
    std::shared_ptr<const Pool> pool;
    std::uint64_t bytes = 0;
    std::uint64_t blocks = 0;
    std::uint32_t drains = 0;
    Error error;                       // in kFailing
    std::optional<SteadyTime> parked;  // waits for its pool until then
  };
  struct RemotePool {
    std::uint64_t serial = 0;
    std::uint64_t bytes = 0;
    std::shared_ptr<const Pool> pool;
    std::optional<Error> error;  // neither pool nor error: being mapped
  };
  enum class State : std::uint8_t {
    kConnecting,  // hello sent
    kMapping,     // welcome; the pools that were there at hello are being mapped
    kUp,
    kEnding,  // waits for the slices in progress, then unmaps, then closes the socket
  };
  struct Session {
    PeerId peer = 0;
    State state = State::kConnecting;
    std::unique_ptr<shm::Channel> channel;
    Epoch epoch = 0;
    SteadyTime welcome_deadline;
    std::uint32_t pools_to_map = 0;  // before PeerUp
    std::map<RankIndex, RemotePool> pools;
    std::map<TransferKey, Transfer> transfers;
    std::set<TransferKey> failed;  // until cancel(): later chunks of these must not start afresh
    Error reason;                  // in kEnding
    bool releasing = false;
    std::optional<FabricOffer> next;  // connect() while kEnding
    std::uint32_t interest = 0;       // what epoll watches
  };
  struct Parked {
    SteadyTime deadline;
    SessionId session;
    TransferKey key;
  };

  // send_core.cc: the loop and the sessions
  void run();
  bool handle_mail();  // false: stop
  void handle(Connect& command);
  void handle(Fence& command);
  void handle(Mapped& command);
  void handle(Released& command);
  void handle(Stop&) {}
  Result<std::unique_ptr<Session>> open_session(PeerId peer, const FabricOffer& offer);
  void on_socket(SessionId id, std::uint32_t events);
  Result<void> on_frame(SessionId id, Session& session, const std::string& text);
  Result<void> on_message(SessionId id, Session& session, shm::Welcome& message);
  Result<void> on_message(SessionId id, Session& session, shm::PoolAdded& message);
  Result<void> on_message(SessionId id, Session& session, shm::PoolGone& message);
  Result<void> on_message(SessionId id, Session& session, shm::Refused& message);
  void drop_pool(SessionId id, Session& session, RankIndex rank);
  void come_up(Session& session);
  void begin_end(SessionId id, Session& session, Error reason);
  void release_when_idle(SessionId id, Session& session);
  void watch(SessionId id, Session& session);
  void check_deadlines();
  int wait_ms() const;
  Session* session_of(PeerId peer, SessionId* id = nullptr);

  // send_transfers.cc: the transfers of a session
  void handle(Post& command);
  void handle(Cancel& command);
  void handle(Finished& command);
  void handle(Idle& command);
  void advance(SessionId id, Session& session, const TransferKey& key);
  Result<bool> start_jobs(SessionId id, Session& session, Transfer& transfer, const TransferKey& key);
  Result<bool> find_pool(Session& session, Transfer& transfer, const TransferKey& key);
  Result<void> start_job(Transfer& transfer, Job& job);
  void finish_job(SessionId id, Session& session, Transfer& transfer, Job& job);
  void fail_transfer(SessionId id, Session& session, const TransferKey& key, Error error);
  void end_failed(SessionId id, Session& session, const TransferKey& key);
  void end_transfer(Session& session, const TransferKey& key);
  void abandon_transfers(Session& session);
  void check_parked(SteadyTime now);
  void reject_post(PeerId peer, const ChunkJob& job, Error error);

  ShmSendOptions options_;
  FabricSink sink_;
  std::string host_id_;
  shm::Mailbox<Command> mailbox_;
  UniqueFd epoll_;
  std::map<SessionId, std::unique_ptr<Session>> sessions_;
  std::unordered_map<PeerId, SessionId> peers_;
  std::unordered_map<LaneId, std::pair<SessionId, TransferKey>> lanes_;
  std::deque<Parked> parked_;   // by deadline: all wait equally long
  SessionId next_session_ = 1;  // 0 is the mailbox in epoll
  LaneId next_lane_ = 1;
  std::uint64_t next_ticket_ = 1;
  std::vector<std::pair<SessionId, Error>> ending_;  // to be ended once the call that found out has returned
  std::size_t jobs_ = 0;                             // queued over all transfers
  std::unique_ptr<shm::SideThread> side_;
  std::unique_ptr<shm::CopyCrew> crew_;
  std::thread thread_;
};

}  // namespace kvferry
