#pragma once
// The decode daemon: owns its parts and carries events between them; see prefill/daemon.h.

#include <boost/asio/io_context.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/steady_timer.hpp>
#include <memory>

#include "common/daemon/config.h"
#include "common/daemon/observer.h"
#include "common/engine/server.h"
#include "common/http/server.h"
#include "common/verify/crew.h"
#include "decode/rooms.h"
#include "decode/services.h"

namespace kvferry::decode {

class Daemon final : public EngineHandler, public ServiceEvents {
 public:
  explicit Daemon(DaemonConfig config);
  ~Daemon() override;

  /// See prefill::Daemon::run.
  int run();

 private:
  // EngineHandler
  Result<void> on_attach(EngineId engine, EngineAttach attach) override;
  Result<void> on_send(EngineId engine, EngineChunk chunk) override;
  Result<void> on_expect(EngineId engine, EngineExpectation expectation) override;
  Result<void> on_abort(EngineId engine, EngineAbort abort) override;
  void on_gone(EngineId engine) override;
  // ServiceEvents
  Descriptor self() const override;
  std::vector<message::RankUp> announcements() const override;
  bool wanted(ServiceId service) const override;
  void on_service_ready(ServiceId service, ServiceInfo info) override;
  void on_service_unreachable(ServiceId service, const Error& error) override;
  void on_service_refused(ServiceId service, const Error& error,
                          const std::vector<Violation>& violations) override;
  void on_accepted(const std::vector<Violation>& warnings) override;
  void on_up(PeerId peer, ReceiveFabric& fabric, const std::string& carries) override;
  void on_control(PeerId peer, const ControlMessage& message) override;
  void on_lost(PeerId peer, const Error& error) override;

  Result<void> start();
  Result<void> start_http();
  void stop();
  void tick();
  void on_fabric(FabricKind kind, const FabricEvent& event);
  void perform(Actions& actions);
  void perform_one(OpenGrant& action);
  void perform_one(CloseGrant& action);
  void perform_one(VerifyRoom& action);
  void perform_one(FencePeer& action);
  void perform_one(SendMessage& action);
  void perform_one(TellEngine& action);
  void perform_one(ResolveDpRank& action);
  void perform_one(ReleasePool& action);
  void perform_one(TransferReport& action);

  HttpResponse serve(const HttpRequest& request);
  std::string status_json() const;
  void update_gauges();

  DaemonConfig config_;
  const Epoch epoch_;
  const std::int64_t started_;
  boost::asio::io_context io_{1};
  boost::asio::signal_set signals_{io_, SIGTERM, SIGINT};
  boost::asio::steady_timer timer_{io_};
  Observer observer_;
  Rooms rooms_;
  std::map<RankIndex, std::shared_ptr<const Pool>> pools_;  // attached or still draining
  std::map<PeerId, ReceiveFabric*> peer_fabric_;            // kept until the fabric reports PeerDown
  HostPort address_;
  std::unique_ptr<HttpServer> http_;
  std::unique_ptr<EngineServer> engines_;
  bool stopping_ = false;
  std::unique_ptr<Services> services_;
  // Last member: the fabrics' threads call the sink, and must be gone before anything else goes.
  std::vector<std::unique_ptr<ReceiveFabric>> fabrics_;
  DigestCrew crew_;  // likewise
};

}  // namespace kvferry::decode
