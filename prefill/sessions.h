#pragma once
// The connected decode daemons: handshake, control channel, choice and connection of a fabric, heartbeats.
// One session is one pair of epochs; when it ends, for whatever reason, its fabric connection is fenced and
// everything of it has failed. Thread: the io_context's.
//
//   handshake accepted -> (channel) -> connecting fabric, next best on failure -> up -> lost

#include <boost/asio/io_context.hpp>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/control/channel.h"
#include "common/control/link.h"
#include "common/control/messages.h"
#include "common/daemon/config.h"
#include "common/handshake/verdict.h"
#include "common/http/message.h"
#include "transport/fabric.h"

namespace kvferry::prefill {

/// What the owner of the sessions does about them. Never called from inside a call into Sessions, except from
/// lose().
class SessionEvents {
 public:
  virtual ~SessionEvents() = default;
  virtual void on_connected(PeerId peer, const Descriptor& decode) = 0;
  virtual void on_up(PeerId peer, const std::string& fabric, const std::string& carries) = 0;
  virtual void on_control(PeerId peer, const ControlMessage& message) = 0;
  virtual void on_lost(PeerId peer, const Error& error) = 0;
  virtual void on_verdict(const Verdict& verdict) = 0;
};

class Sessions {
 public:
  Sessions(boost::asio::io_context& io, const DaemonConfig& config,
           const std::vector<std::unique_ptr<SendFabric>>& fabrics, SessionEvents& events);

  /// POST /v1/handshake. `self` is this daemon's Descriptor as of now.
  HttpResponse handshake(const HttpRequest& request, const Descriptor& self);
  /// The upgrade of /v1/control?session=HEX.
  std::optional<HttpResponse> admit(const HttpRequest& request);
  void accepted(const HttpRequest& request, std::shared_ptr<Channel> channel);

  void send(PeerId peer, const ControlMessage& message);
  /// Ends the session: the channel closes, the fabric connection is fenced.
  void lose(PeerId peer, const Error& error);
  SendFabric* fabric(PeerId peer);
  /// Its fabric is not up yet: PeerDown then only means that this candidate does not connect.
  bool connecting(PeerId peer) const;
  void on_fabric_up(PeerId peer, FabricKind kind, const std::string& carries);
  void on_candidate_down(PeerId peer, FabricKind kind, const Error& error);
  void tick(std::int64_t now);

  std::size_t size() const { return sessions_.size(); }
  /// Name of a peer for logs and messages: "instance (address)".
  std::string name(PeerId peer) const;
  /// Its configured name alone, for metric labels.
  std::string instance(PeerId peer) const;
  /// One line per peer for /v1/status.
  struct Row {
    PeerId peer;
    std::string instance;
    std::string address;
    std::string fabric;
    std::string carries;
    bool up;
  };
  std::vector<Row> rows() const;

 private:
  struct Session {
    Descriptor decode;
    std::uint64_t token = 0;
    std::int64_t created = 0;
    std::shared_ptr<Channel> channel;
    std::optional<ControlLink> link;  // with the channel
    std::vector<std::pair<SendFabric*, FabricOffer>> candidates;
    std::size_t candidate = 0;
    bool up = false;
    std::string carries;
    std::string problems;  // of the candidates that failed
  };
  void send_bytes(PeerId peer, Session& session, std::string bytes);
  PeerId find_token(const HttpRequest& request) const;
  void next_candidate(PeerId peer);
  void drop_epoch(Epoch epoch);

  boost::asio::io_context& io_;
  const DaemonConfig& config_;
  const std::vector<std::unique_ptr<SendFabric>>& fabrics_;
  SessionEvents& events_;
  std::map<PeerId, Session> sessions_;
  PeerId next_peer_ = 1;
};

}  // namespace kvferry::prefill
