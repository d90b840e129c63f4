#pragma once
// The prefill services that rooms name by their bootstrap address, and the prefill daemons behind them:
// topology, compatibility, handshake, control channel, heartbeats, reconnection. Thread: the io_context's.
//
//   service:  idle -> topology -> peers connecting -> ready        (refused | unreachable: tried again, see
//   below) peer:     handshake -> channel -> fabric reported by prefill -> up -> lost
//
// A service is (re)connected when a room needs it: at once, and after a failure again each second while rooms
// wait.

#include <boost/asio/io_context.hpp>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "common/control/channel.h"
#include "common/control/link.h"
#include "common/control/messages.h"
#include "common/daemon/config.h"
#include "common/handshake/verdict.h"
#include "common/http/message.h"
#include "decode/rooms.h"
#include "transport/fabric.h"

namespace kvferry::decode {

/// What the owner of the services does about them; see prefill/sessions.h for the manners.
class ServiceEvents {
 public:
  virtual ~ServiceEvents() = default;
  virtual Descriptor self() const = 0;  // with attached ranks, without fabrics
  virtual std::vector<message::RankUp> announcements() const = 0;
  virtual bool wanted(ServiceId service) const = 0;
  virtual void on_service_ready(ServiceId service, ServiceInfo info) = 0;
  virtual void on_service_unreachable(ServiceId service, const Error& error) = 0;
  virtual void on_service_refused(ServiceId service, const Error& error,
                                  const std::vector<Violation>& violations) = 0;
  virtual void on_accepted(const std::vector<Violation>& warnings) = 0;
  virtual void on_up(PeerId peer, ReceiveFabric& fabric, const std::string& carries) = 0;
  virtual void on_control(PeerId peer, const ControlMessage& message) = 0;
  virtual void on_lost(PeerId peer, const Error& error) = 0;
};

class Services {
 public:
  Services(boost::asio::io_context& io, const DaemonConfig& config,
           const std::vector<std::unique_ptr<ReceiveFabric>>& fabrics, ServiceEvents& events);

  /// The service at this bootstrap address, connecting it if needed. kInvalid: not an address; kExhausted:
  /// too many.
  Result<ServiceId> need(const std::string& bootstrap);
  /// Asks the bootstrap server which DP rank has the room.
  void resolve_dp_rank(ServiceId service, Room room, std::function<void(std::optional<std::uint32_t>)> done);

  void send(PeerId peer, const ControlMessage& message);
  void broadcast(const ControlMessage& message);
  void lose(PeerId peer, const Error& error);
  ReceiveFabric* fabric(PeerId peer);
  /// A connection of this peer over that fabric has ended. Of a peer that has not reported its fabric yet it
  /// is remembered: the report may still be on the way, and nothing would ever end that peer's transfers.
  void fabric_down(PeerId peer, FabricKind kind);
  void tick(std::int64_t now);

  std::size_t connected() const;
  std::string name(PeerId peer) const;
  /// Its configured name alone, for metric labels.
  std::string instance(PeerId peer) const;
  struct Row {
    std::string instance;
    std::string address;
    std::string fabric;
    std::string carries;
    bool up;
    std::string error;
  };
  std::vector<Row> rows() const;

 private:
  enum class State : std::uint8_t { kIdle, kFetching, kConnecting, kReady };
  struct Service {
    HostPort bootstrap;
    State state = State::kIdle;
    std::int64_t retry_at = 0;
    Descriptor prefill;
    bool follow_bootstrap_room = true;
    std::map<RankIndex, HostPort> daemons;
    std::optional<Error> error;  // of the last attempt
    bool refused = false;        // that attempt was refused by the rules
    std::vector<Violation> violations;
  };
  struct Peer {
    HostPort address;
    Descriptor prefill;
    std::uint64_t session = 0;
    std::shared_ptr<Channel> channel;
    std::optional<ControlLink> link;  // with the channel
    std::shared_ptr<Pending> pending;
    ReceiveFabric* fabric = nullptr;
    std::string carries;
    bool up = false;
    std::vector<FabricKind> ended;  // connections that ended before it was up
    std::int64_t started = 0;
  };

  void send_bytes(PeerId id, Peer& peer, std::string bytes);
  void connect(ServiceId id);
  void on_topology(ServiceId id, const Result<HttpResponse>& answer);
  void connect_peer(const HostPort& address);
  void on_handshake(PeerId id, const Result<HttpResponse>& answer);
  void on_channel(PeerId id, Result<std::shared_ptr<Channel>> channel);
  void on_message(PeerId id, std::string_view bytes);
  void on_fabric_status(PeerId id, const message::FabricStatus& status);
  void service_failed(ServiceId id, const Error& error, bool refused, std::vector<Violation> violations);
  void peer_failed(PeerId id, const Error& error, bool refused, std::vector<Violation> violations);
  void check_ready(ServiceId id);
  PeerId find_peer(const HostPort& address) const;
  std::vector<ServiceId> services_of(const HostPort& address) const;

  boost::asio::io_context& io_;
  const DaemonConfig& config_;
  const std::vector<std::unique_ptr<ReceiveFabric>>& fabrics_;
  ServiceEvents& events_;
  std::map<ServiceId, Service> services_;
  std::map<HostPort, ServiceId> by_address_;
  std::map<PeerId, Peer> peers_;
  ServiceId next_service_ = 1;
  PeerId next_peer_ = 1;
};

/// "3 rules are violated: Page size mismatch...; ..." for engines and logs.
Error refusal(const std::vector<Violation>& violations);

}  // namespace kvferry::decode
