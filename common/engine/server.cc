#include "common/engine/server.h"

#include <sys/socket.h>

#include <algorithm>
#include <boost/asio/local/stream_protocol.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cerrno>
#include <chrono>
#include <unordered_map>
#include <utility>

#include "common/base/log.h"
#include "common/engine/server_connection.h"
#include "common/engine/server_socket.h"
#include "common/engine/wire.h"

namespace kvferry {

namespace asio = boost::asio;

namespace {

// Out of descriptors or memory: waiting lets other connections end, trying at once would spin.
constexpr auto kAcceptPause = std::chrono::milliseconds(100);
// After this many new connections the engines that are here get their turn.
constexpr int kAcceptsPerTurn = 64;

// A refused engine gets its reason from an empty socket buffer, so one write is enough.
void refuse(int socket, const Error& error) {
  const std::string frame =
      wire::encode(wire::Reply{0, static_cast<std::uint8_t>(error.code), error.message});
  // Nothing is lost if it fails: the engine is gone.
  [[maybe_unused]] const ssize_t sent =
      ::send(socket, frame.data(), frame.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

}  // namespace

struct EngineServer::Impl final : EngineConnection::Owner, std::enable_shared_from_this<EngineServer::Impl> {
  Impl(asio::io_context& context, EngineServerOptions server_options, EngineHandler& engine_handler)
      : io(context),
        options(std::move(server_options)),
        target(engine_handler),
        acceptor(context),
        pause(context) {}

  Result<void> start() {
    if (acceptor.is_open()) {
      return fail(Code::kConflict, "the engine server on {} runs already", options.path);
    }
    KVF_TRY(SocketFile listening, SocketFile::listen(options.path, options.mode));
    UniqueFd fd = listening.take_fd();
    boost::system::error_code error;
    acceptor.assign(asio::local::stream_protocol(), fd.get(), error);
    if (error) {
      return fail(Code::kIo, "watch {}: {}", options.path, error.message());
    }
    fd.release();
    file = std::make_unique<SocketFile>(std::move(listening));
    wait_accept();
    return {};
  }

  void wait_accept() {
    acceptor.async_wait(asio::socket_base::wait_read,
                        [self = shared_from_this()](const boost::system::error_code& error) {
                          if (!error && self->acceptor.is_open()) {
                            self->accept_some();
                          }
                        });
  }

  void accept_some() {
    for (int i = 0; i < kAcceptsPerTurn; ++i) {
      UniqueFd socket(::accept4(acceptor.native_handle(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (socket) {
        admit(std::move(socket));
        continue;
      }
      if (errno == EINTR || errno == ECONNABORTED) {
        continue;
      }
      if (errno == EAGAIN || errno == EWOULDBLOCK) {
        break;
      }
      KVF_LOG_ERROR("engine socket cannot accept", log::kv("error", errno_error("accept", errno).message));
      pause.expires_after(kAcceptPause);
      pause.async_wait([self = shared_from_this()](const boost::system::error_code& error) {
        if (!error && self->acceptor.is_open()) {
          self->wait_accept();
        }
      });
      return;
    }
    wait_accept();
  }

  void admit(UniqueFd socket) {
    const auto peer = peer_credentials(socket.get());
    Result<void> verdict = peer ? may_connect(*peer) : Result<void>(fail(peer.error()));
    if (verdict) {
      const EngineId id = ++last_id;
      auto connection = std::make_shared<EngineConnection>(io, options, *this, id, *peer);
      verdict = connection->start(socket);
      if (verdict) {
        connections.emplace(id, std::move(connection));
        return;
      }
    }
    KVF_LOG_WARN("engine refused", log::kv("code", to_string(verdict.error().code)),
                 log::kv("reason", verdict.error().message));
    refuse(socket.get(), verdict.error());
  }

  Result<void> may_connect(const PeerCredentials& peer) const {
    std::vector<std::uint32_t> allowed = options.allowed_uids;
    if (allowed.empty()) {
      allowed = {::geteuid(), 0};
    }
    const std::vector<std::uint32_t>& groups = options.allowed_gids;
    if (std::find(allowed.begin(), allowed.end(), peer.uid) == allowed.end() &&
        std::find(groups.begin(), groups.end(), peer.gid) == groups.end()) {
      return fail(Code::kUnauthorized,
                  "uid {} with gid {} (pid {}) may not attach, allowed are uids {} and gids {}: add it to "
                  "allowed_uids or allowed_gids of the engine socket",
                  peer.uid, peer.gid, peer.pid, fmt::join(allowed, ", "),
                  groups.empty() ? "none" : fmt::format("{}", fmt::join(groups, ", ")));
    }
    if (connections.size() >= options.engines_max) {
      return fail(Code::kExhausted, "{} engines are connected, engines_max is {}: raise engines_max",
                  connections.size(), options.engines_max);
    }
    return {};
  }

  EngineHandler& handler() override { return target; }

  void on_connection_end(EngineId engine, bool was_attached) override {
    connections.erase(engine);
    if (was_attached) {
      target.on_gone(engine);
    }
  }

  void send_event(EngineId engine, const EngineEvent& event) {
    const auto found = connections.find(engine);
    if (found != connections.end()) {
      found->second->send_event(event);
    }
  }

  void stop() {
    boost::system::error_code ignored;
    acceptor.close(ignored);
    pause.cancel();
    file.reset();
    for (const auto& [id, connection] : std::exchange(connections, {})) {
      connection->close();
    }
  }

  asio::io_context& io;
  const EngineServerOptions options;
  EngineHandler& target;
  asio::local::stream_protocol::acceptor acceptor;
  asio::steady_timer pause;
  std::unique_ptr<SocketFile> file;
  std::unordered_map<EngineId, std::shared_ptr<EngineConnection>> connections;
  EngineId last_id = 0;
};

EngineServer::EngineServer(asio::io_context& io, EngineServerOptions options, EngineHandler& handler)
    : impl_(std::make_shared<Impl>(io, std::move(options), handler)) {}

EngineServer::~EngineServer() {
  stop();
}

Result<void> EngineServer::start() {
  return impl_->start();
}

void EngineServer::send_event(EngineId engine, const EngineEvent& event) {
  impl_->send_event(engine, event);
}

void EngineServer::stop() {
  impl_->stop();
}

}  // namespace kvferry
