#include "common/http/server.h"

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <utility>

#include "common/base/check.h"
#include "common/base/log.h"
#include "common/http/session.h"

namespace kvferry {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

namespace {

// Connections above connections_max that may wait for their 503 to be read; those beyond are just closed.
constexpr std::uint32_t kRefusingMax = 64;
// After a failed accept (usually: out of file descriptors) trying again at once would only burn the CPU.
constexpr std::chrono::milliseconds kAcceptPause{100};

void admit_connection(const std::shared_ptr<HttpServerState>& state, Stream stream) {
  set_no_delay(stream);
  if (state->open < state->limits.connections_max) {
    ++state->stats.accepted;
    serve_connection(state, std::move(stream),
                     std::make_shared<ConnectionSlot>(state, &HttpServerState::open));
    return;
  }
  ++state->stats.refused;
  if (state->refusing < kRefusingMax) {
    refuse_connection(state, std::move(stream),
                      std::make_shared<ConnectionSlot>(state, &HttpServerState::refusing));
  }
}

void accept_next(const std::shared_ptr<HttpServerState>& state,
                 const std::shared_ptr<tcp::acceptor>& acceptor);

void accept_after_pause(const std::shared_ptr<HttpServerState>& state,
                        const std::shared_ptr<tcp::acceptor>& acceptor) {
  auto timer = std::make_shared<asio::steady_timer>(state->io, kAcceptPause);
  timer->async_wait([state, acceptor, timer](error_code) {
    if (!state->stopped) {
      accept_next(state, acceptor);
    }
  });
}

void accept_next(const std::shared_ptr<HttpServerState>& state,
                 const std::shared_ptr<tcp::acceptor>& acceptor) {
  acceptor->async_accept([state, acceptor](error_code failed, Stream stream) {
    if (state->stopped) {
      return;
    }
    if (failed) {
      KVF_LOG_WARN("cannot accept a connection", log::kv("error", failed.message()));
      accept_after_pause(state, acceptor);
      return;
    }
    admit_connection(state, std::move(stream));
    accept_next(state, acceptor);
  });
}

Result<tcp::endpoint> endpoint_of(asio::io_context& io, const HostPort& address) {
  error_code error;
  const auto literal = asio::ip::make_address(address.host, error);
  if (!error) {
    return tcp::endpoint(literal, address.port);
  }
  tcp::resolver resolver(io);
  const auto found = resolver.resolve(address.host, std::to_string(address.port),
                                      tcp::resolver::numeric_service | tcp::resolver::passive, error);
  if (error || found.empty()) {
    return fail(Code::kInvalid, "cannot listen on {}: cannot resolve host '{}': {}", address.to_string(),
                address.host, error.message());
  }
  return found.begin()->endpoint();
}

}  // namespace

HttpServer::HttpServer(asio::io_context& io, HttpLimits limits, HttpHandler handler)
    : state_(std::make_shared<HttpServerState>(io, limits, std::move(handler))) {
  KVF_CHECK(state_->handler != nullptr);
}

HttpServer::~HttpServer() {
  stop();
}

Result<HostPort> HttpServer::listen(const HostPort& address) {
  KVF_TRY(const tcp::endpoint endpoint, endpoint_of(state_->io, address));
  if (state_->stopped) {
    return fail(Code::kUnavailable, "cannot listen on {}: the server has been stopped", address.to_string());
  }
  auto acceptor = std::make_shared<tcp::acceptor>(state_->io);
  error_code error;
  const auto step = [&](const char* what) -> Result<void> {
    if (error) {
      return fail(Code::kIo, "cannot listen on {}: {}: {}", address.to_string(), what, error.message());
    }
    return {};
  };
  acceptor->open(endpoint.protocol(), error);
  KVF_TRY_VOID(step("socket"));
  acceptor->set_option(tcp::acceptor::reuse_address(true), error);
  KVF_TRY_VOID(step("SO_REUSEADDR"));
  acceptor->bind(endpoint, error);
  KVF_TRY_VOID(step("bind"));
  acceptor->listen(asio::socket_base::max_listen_connections, error);
  KVF_TRY_VOID(step("listen"));
  const tcp::endpoint bound = acceptor->local_endpoint(error);
  KVF_TRY_VOID(step("local address"));
  state_->acceptors.push_back(acceptor);
  accept_next(state_, acceptor);
  return HostPort{.host = bound.address().to_string(), .port = bound.port()};
}

void HttpServer::on_upgrade(std::string path, UpgradeAdmit admit, UpgradeAccepted accepted,
                            ChannelLimits limits) {
  KVF_CHECK(admit != nullptr && accepted != nullptr);
  state_->upgrades[std::move(path)] =
      std::make_shared<const UpgradeRoute>(UpgradeRoute{std::move(admit), std::move(accepted), limits});
}

void HttpServer::stop() {
  state_->stopped = true;
  for (const auto& acceptor : state_->acceptors) {
    error_code ignored;
    acceptor->close(ignored);
  }
  state_->acceptors.clear();
  stop_connections(*state_);
}

HttpStats HttpServer::stats() const {
  return state_->stats;
}

std::uint32_t HttpServer::connections() const {
  return state_->open;
}

}  // namespace kvferry
