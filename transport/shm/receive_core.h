#pragma once
// The thread behind ShmReceiveFabric: one epoll over the listening socket, the sessions and a mailbox.

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <variant>

#include "transport/grant_table.h"
#include "transport/shm/channel.h"
#include "transport/shm/listen_socket.h"
#include "transport/shm/mailbox.h"
#include "transport/shm/message.h"
#include "transport/shm/receive_fabric.h"

namespace kvferry {

class ShmReceiveFabric::Core {
 public:
  Core(ShmReceiveOptions options, FabricSink sink) : options_(std::move(options)), sink_(std::move(sink)) {}
  ~Core();
  Result<void> start();

  struct AddPool {
    std::shared_ptr<const Pool> pool;
  };
  struct RemovePool {
    RankIndex rank;
  };
  struct Admit {
    PeerId peer;
    std::string token;
  };
  struct Open {
    Grant grant;
  };
  struct Close {
    GrantKey key;
  };
  struct Fence {
    PeerId peer;
  };
  struct Stop {};
  using Command = std::variant<AddPool, RemovePool, Admit, Open, Close, Fence, Stop>;

  void post(Command command) { mailbox_.post(std::move(command)); }
  Result<FabricOffer> offer(PeerId peer);

 private:
  using SteadyTime = std::chrono::steady_clock::time_point;
  using SessionId = std::uint64_t;
  enum class State : std::uint8_t {
    kHello,    // accepted, has not shown a token; owns nothing
    kUp,       // a peer that has the descriptors of all pools
    kClosing,  // has been told to let go; its end of stream is awaited
  };
  struct Session {
    shm::Channel channel;
    SteadyTime hello_deadline;
    State state = State::kHello;
    PeerId peer = 0;             // from kUp on
    Error reason{};              // in kClosing
    std::uint32_t interest = 0;  // what epoll watches
  };
  struct ListedPool {
    std::uint64_t serial = 0;
    std::shared_ptr<const Pool> pool;
  };

  void run();
  void handle_mail();
  void handle(AddPool& command);
  void handle(RemovePool& command);
  void handle(Admit& command);
  void handle(Open& command);
  void handle(Close& command);
  void handle(Fence& command);
  void handle(Stop&) { stopping_ = true; }

  void accept_all();
  void set_accepting(bool accepting);
  void admit_connection(UniqueFd socket);
  void on_session_event(SessionId id, std::uint32_t events);
  // False: the session is gone or closing.
  bool on_frame(SessionId id, const std::string& text);
  bool on_hello(SessionId id, Session& session, const shm::Hello& hello);
  void settle(PeerId peer);
  void on_notice(Session& session, const shm::Notice& notice);
  void push(SessionId id, Session& session, std::string text, std::shared_ptr<const Pool> pool = nullptr);
  void push_pool(SessionId id, Session& session, const ListedPool& listed);
  void refuse(SessionId id, Error error);
  void reject(PeerId peer, Error error);
  void begin_close(Session& session, Error reason);
  void end_session(SessionId id, Error reason);
  void watch(SessionId id, Session& session);
  void drop_silent();
  int wait_ms() const;

  ShmReceiveOptions options_;
  FabricSink sink_;
  std::string host_id_;
  shm::Mailbox<Command> mailbox_;
  UniqueFd epoll_;
  shm::ListenSocket listener_;
  bool accepting_ = true;
  bool stopping_ = false;
  SteadyTime accept_again_;

  GrantTable grants_;
  std::map<RankIndex, ListedPool> pools_;
  std::uint64_t next_serial_ = 1;
  std::unordered_map<std::string, PeerId> tokens_;  // offered and not used
  std::unordered_map<PeerId, SessionId> peers_;     // kUp or kClosing
  std::map<SessionId, Session> sessions_;
  SessionId next_session_ = 2;  // 0 and 1 are the mailbox and the listener in epoll
  std::thread thread_;
};

}  // namespace kvferry
