#pragma once
// TCP sockets as the fabric wants them: non-blocking, no delay, keepalive, bounded buffers. Addresses are
// numeric, so that nothing here ever waits for a resolver. Errors are kIo or kInvalid and name the address.

#include <cstdint>
#include <string>

#include "common/base/result.h"
#include "common/base/unique_fd.h"

namespace kvferry {

struct TcpSocketOptions {
  // Bytes per direction and stream; 0 leaves it to the system. Bounded so that what is in flight stays in the
  // cache: on loopback, larger buffers made every byte travel through memory twice more.
  int buffer_bytes = 1 << 20;
  int keepalive_idle_s = 10;
  int keepalive_interval_s = 3;
  int keepalive_probes = 3;
  // Congestion control by the system's name for it; empty: the system's choice. BBR, which some hosts choose,
  // starts anew after each pause: bursts of 70 MB went at half of what cubic gave them.
  std::string congestion;
  int user_timeout_ms = 20'000;  // sent bytes that stay unacknowledged for this long end the connection
};

/// `host` may be a wildcard; port 0 lets the system choose.
Result<UniqueFd> listen_tcp(const std::string& host, std::uint16_t port, const TcpSocketOptions& options);
/// Whether connections could be made with these options at all; an error names what this system lacks.
Result<void> check_options(const TcpSocketOptions& options);
/// Starts connecting; the socket becomes writable when that has ended, well or not.
Result<UniqueFd> connect_tcp(const std::string& host, std::uint16_t port, const TcpSocketOptions& options);
/// For accepted sockets.
Result<void> prepare_tcp(int fd, const TcpSocketOptions& options);
/// The pending error of a socket, as an Error of kPeerLost; `what` says who.
Error socket_error(int fd, const std::string& what);
Result<std::uint16_t> local_port(int fd);
bool is_wildcard(const std::string& host);
/// Makes close() reset the connection and drop what has not been sent.
void reset_on_close(int fd);

}  // namespace kvferry
