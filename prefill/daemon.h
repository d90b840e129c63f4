#pragma once
// The prefill daemon: owns its parts and carries events between them. Everything runs on one io_context
// thread except the fabrics, which have their own.

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/steady_timer.hpp>
#include <memory>
#include <optional>

#include "common/auth/signed_request.h"
#include "common/bootstrap/routes.h"
#include "common/daemon/config.h"
#include "common/daemon/observer.h"
#include "common/engine/server.h"
#include "common/http/server.h"
#include "common/verify/crew.h"
#include "prefill/rooms.h"
#include "prefill/sessions.h"

namespace kvferry::prefill {

class Daemon final : public EngineHandler, public SessionEvents {
 public:
  explicit Daemon(DaemonConfig config);
  ~Daemon() override;

  /// Opens everything, prints one JSON line with the bound addresses on stdout, and runs until SIGTERM or
  /// SIGINT. Returns the exit code: 0, or 1 when something could not be opened (reason on stderr).
  int run();

 private:
  // EngineHandler
  Result<void> on_attach(EngineId engine, EngineAttach attach) override;
  Result<void> on_send(EngineId engine, EngineChunk chunk) override;
  Result<void> on_expect(EngineId engine, EngineExpectation expectation) override;
  Result<void> on_abort(EngineId engine, EngineAbort abort) override;
  void on_gone(EngineId engine) override;
  // SessionEvents
  void on_connected(PeerId peer, const Descriptor& decode) override;
  void on_up(PeerId peer, const std::string& fabric, const std::string& carries) override;
  void on_control(PeerId peer, const ControlMessage& message) override;
  void on_lost(PeerId peer, const Error& error) override;
  void on_verdict(const Verdict& verdict) override;

  Result<void> start();
  Result<void> start_http();
  void stop();
  void tick();
  void on_fabric(FabricKind kind, const FabricEvent& event);
  void perform(Actions& actions);
  void perform_one(PostChunk& action);
  void perform_one(CancelTransfer& action);
  void perform_one(DigestChunk& action);
  void perform_one(FencePeer& action);
  void perform_one(SendMessage& action);
  void perform_one(TellEngine& action);
  void perform_one(TransferReport& action);

  // HTTP
  HttpResponse serve(const HttpRequest& request);
  HttpResponse answer(const HttpRequest& request);
  /// The nonce of a request that is signed as it must be; empty where none is asked for.
  Result<std::string> authenticate(const HttpRequest& request);
  HttpResponse serve_metrics(const HttpRequest& request);
  std::string status_json() const;
  Descriptor descriptor() const;
  void register_ranks();
  void register_remotely(RankIndex rank, int attempt);
  void wait_for_fence(std::uint64_t fence, EngineId engine, Room room, UniqueFd ready);
  void update_gauges();

  DaemonConfig config_;
  const Epoch epoch_;
  const std::int64_t started_;
  boost::asio::io_context io_{1};
  boost::asio::signal_set signals_{io_, SIGTERM, SIGINT};
  boost::asio::steady_timer timer_{io_};
  Observer observer_;
  Rooms rooms_;
  std::optional<RequestGuard> guard_;  // with a key
  Registry registry_;
  BootstrapRoutes routes_{registry_};
  std::map<RankIndex, std::shared_ptr<const Pool>> pools_;
  std::map<PeerId, std::string> peer_fabric_;
  HostPort bootstrap_;
  HostPort metrics_address_;
  std::unique_ptr<HttpServer> http_;
  std::unique_ptr<HttpServer> metrics_http_;
  std::unique_ptr<EngineServer> engines_;
  struct Fence {
    EngineId engine;
    Room room;
    boost::asio::posix::stream_descriptor fd;
  };
  std::map<std::uint64_t, std::unique_ptr<Fence>> fences_;
  std::uint64_t next_fence_ = 1;
  bool stopping_ = false;
  std::unique_ptr<Sessions> sessions_;
  // Last member: the fabrics' threads call the sink, and must be gone before anything else goes.
  std::vector<std::unique_ptr<SendFabric>> fabrics_;
  DigestCrew crew_;  // likewise
};

}  // namespace kvferry::prefill
