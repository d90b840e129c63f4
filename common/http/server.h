#pragma once
// The HTTP/1.1 server of a daemon: handshake, bootstrap routes, status, metrics, and the WebSocket upgrade
// that starts a control channel. One thread, the io_context's, which also must outlive the server. Everything
// a peer can make large is bounded: connections, header, body, and the time from a request's first byte to
// its last.
//
// Refusals of the server itself carry {"error": "..."}: 400 malformed, 408 too slow, 413 body, 431 header,
// 500 the handler threw, 503 too many connections; the connection is closed after each but 500.

#include <boost/asio/io_context.hpp>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "common/base/host_port.h"
#include "common/base/result.h"
#include "common/control/channel.h"
#include "common/http/message.h"

namespace kvferry {

struct HttpLimits {
  std::uint64_t body_bytes_max = 1 << 20;
  std::uint32_t header_bytes_max = 16 << 10;
  std::uint32_t connections_max = 256;               // open at once, accepted channels included
  std::chrono::milliseconds request_timeout{10000};  // first byte to last; also for writing the answer
  std::chrono::milliseconds idle_timeout{60000};     // between requests
};

struct HttpStats {
  std::uint64_t accepted = 0;   // connections
  std::uint64_t refused = 0;    // connections above connections_max
  std::uint64_t requests = 0;   // complete and well formed
  std::uint64_t malformed = 0;  // 400, 413, 431, and connections that ended inside a request
  std::uint64_t timeouts = 0;   // requests not complete, or answers not taken, within request_timeout
};

/// Runs on the io_context thread and must not block. HEAD arrives as HEAD; a body in its answer is counted in
/// Content-Length and not sent.
using HttpHandler = std::function<HttpResponse(const HttpRequest&)>;
/// A response refuses the upgrade with that status.
using UpgradeAdmit = std::function<std::optional<HttpResponse>(const HttpRequest&)>;
using UpgradeAccepted = std::function<void(const HttpRequest&, std::shared_ptr<Channel>)>;

struct HttpServerState;

class HttpServer {
 public:
  HttpServer(boost::asio::io_context& io, HttpLimits limits, HttpHandler handler);
  ~HttpServer();  // stop()
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  /// Listens on one more address and returns what was bound (port 0: the system chooses). [::] also takes
  /// IPv4. A name is resolved here, blocking, and binds its first address.
  Result<HostPort> listen(const HostPort& address);

  /// WebSocket requests for exactly `path` go to `admit`, then to `accepted`; plain requests for it, and
  /// WebSocket requests for other paths, go to the handler.
  void on_upgrade(std::string path, UpgradeAdmit admit, UpgradeAccepted accepted, ChannelLimits limits = {});

  /// Closes the listeners and every connection; an answer that is being written is still finished. Accepted
  /// channels belong to their owner and stay. No callback runs afterwards.
  void stop();

  HttpStats stats() const;
  /// Open connections, accepted channels included.
  std::uint32_t connections() const;

 private:
  std::shared_ptr<HttpServerState> state_;
};

}  // namespace kvferry
