#pragma once
// Internal to the HTTP server: what all connections share, and one connection.
//
//   idle --byte--> reading --complete--> answering --keep-alive--> idle
//                     |                      '--close / refusal--> lingering --> closed
//                     '--WebSocket, admitted--> the stream leaves as a Channel
//
// Lingering: after the last answer the sending side is shut down and what the peer still sends is discarded
// for a moment, because closing with unread bytes would reset the connection and lose the answer.

#include <boost/asio/io_context.hpp>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "common/http/server.h"
#include "common/http/stream.h"

namespace kvferry {

class HttpSession;

struct UpgradeRoute {
  UpgradeAdmit admit;
  UpgradeAccepted accepted;
  ChannelLimits limits;
};

struct HttpServerState {
  HttpServerState(boost::asio::io_context& context, HttpLimits given, HttpHandler function)
      : io(context), limits(given), handler(std::move(function)) {}

  boost::asio::io_context& io;
  HttpLimits limits;
  HttpHandler handler;
  // Shared, so that a route may be replaced from inside its own callback.
  std::map<std::string, std::shared_ptr<const UpgradeRoute>> upgrades;
  HttpStats stats;
  std::uint32_t open = 0;      // ConnectionSlots alive
  std::uint32_t refusing = 0;  // connections above the limit that are being told so
  bool stopped = false;
  std::unordered_set<HttpSession*> sessions;  // each removes itself
  std::vector<std::shared_ptr<boost::asio::ip::tcp::acceptor>> acceptors;
};

/// Counts one connection or channel against a limit for as long as it lives.
class ConnectionSlot {
 public:
  ConnectionSlot(std::shared_ptr<HttpServerState> state, std::uint32_t HttpServerState::*counter)
      : state_(std::move(state)), counter_(counter) {
    ++((*state_).*counter_);
  }
  ~ConnectionSlot() { --((*state_).*counter_); }
  ConnectionSlot(const ConnectionSlot&) = delete;
  ConnectionSlot& operator=(const ConnectionSlot&) = delete;

 private:
  std::shared_ptr<HttpServerState> state_;
  std::uint32_t HttpServerState::*counter_;
};

/// Serves `stream` until it ends; the connection keeps itself alive.
void serve_connection(std::shared_ptr<HttpServerState> state, Stream stream,
                      std::shared_ptr<ConnectionSlot> slot);
/// Answers 503 and closes.
void refuse_connection(std::shared_ptr<HttpServerState> state, Stream stream,
                       std::shared_ptr<ConnectionSlot> slot);
/// For HttpServer::stop().
void stop_connections(HttpServerState& state);

}  // namespace kvferry
