#include "transport/tcp/socket.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <memory>

#include "common/base/host_port.h"

namespace kvferry {
namespace {

struct Address {
  sockaddr_storage storage = {};
  socklen_t bytes = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  int family() const { return storage.ss_family; }
};

Result<Address> parse_address(const std::string& host, std::uint16_t port) {
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const std::string service = std::to_string(port);
  if (const int error = ::getaddrinfo(host.c_str(), service.c_str(), &hints, &list); error != 0) {
    return fail(Code::kInvalid, "tcp address '{}' is not a numeric IPv4 or IPv6 address: {}", host,
                ::gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(list, ::freeaddrinfo);
  Address address;
  std::memcpy(&address.storage, list->ai_addr, list->ai_addrlen);
  address.bytes = list->ai_addrlen;
  return address;
}

Result<void> set(int fd, int level, int option, int value, const char* name) {
  if (::setsockopt(fd, level, option, &value, sizeof value) != 0) {
    return fail(errno_error(fmt::format("setsockopt {} = {}", name, value), errno));
  }
  return {};
}

Result<void> choose_congestion(int fd, const std::string& name) {
  if (name.empty() ||
      ::setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(), static_cast<socklen_t>(name.size())) == 0) {
    return {};
  }
  if (errno != ENOENT && errno != EPERM) {
    return fail(errno_error(fmt::format("setsockopt TCP_CONGESTION = '{}'", name), errno));
  }
  std::ifstream file("/proc/sys/net/ipv4/tcp_available_congestion_control");
  std::string available;
  std::getline(file, available);
  return fail(Code::kInvalid,
              "congestion control '{}' {}; here are: {}; load its module or choose another one", name,
              errno == EPERM ? "is for root only" : "is not in this kernel", available);
}

/// Buffer sizes count from the handshake on, so they are set before listen() and connect().
Result<void> set_buffers(int fd, const TcpSocketOptions& options) {
  if (options.buffer_bytes > 0) {
    KVF_TRY_VOID(set(fd, SOL_SOCKET, SO_SNDBUF, options.buffer_bytes, "SO_SNDBUF"));
    KVF_TRY_VOID(set(fd, SOL_SOCKET, SO_RCVBUF, options.buffer_bytes, "SO_RCVBUF"));
  }
  return {};
}

Result<UniqueFd> open_socket(int family, const TcpSocketOptions& options) {
  UniqueFd fd(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) {
    return fail(errno_error("socket", errno));
  }
  KVF_TRY_VOID(set_buffers(fd.get(), options));
  return fd;
}

}  // namespace

Result<UniqueFd> listen_tcp(const std::string& host, std::uint16_t port, const TcpSocketOptions& options) {
  KVF_TRY(const Address address, parse_address(host, port));
  KVF_TRY(UniqueFd fd, open_socket(address.family(), options));
  KVF_TRY_VOID(set(fd.get(), SOL_SOCKET, SO_REUSEADDR, 1, "SO_REUSEADDR"));
  const std::string name = HostPort{host, port}.to_string();
  if (::bind(fd.get(), address.get(), address.bytes) != 0) {
    return fail(errno_error(fmt::format("bind to {}", name), errno));
  }
  if (::listen(fd.get(), 256) != 0) {
    return fail(errno_error(fmt::format("listen on {}", name), errno));
  }
  return fd;
}

Result<void> check_options(const TcpSocketOptions& options) {
  KVF_TRY(const UniqueFd fd, open_socket(AF_INET, options));
  return prepare_tcp(fd.get(), options);
}

Result<UniqueFd> connect_tcp(const std::string& host, std::uint16_t port, const TcpSocketOptions& options) {
  KVF_TRY(const Address address, parse_address(host, port));
  KVF_TRY(UniqueFd fd, open_socket(address.family(), options));
  KVF_TRY_VOID(prepare_tcp(fd.get(), options));
  if (::connect(fd.get(), address.get(), address.bytes) != 0 && errno != EINPROGRESS) {
    Error error = errno_error(fmt::format("connect to {}", HostPort{host, port}.to_string()), errno);
    error.code = Code::kPeerLost;
    return fail(std::move(error));
  }
  return fd;
}

Result<void> prepare_tcp(int fd, const TcpSocketOptions& options) {
  KVF_TRY_VOID(set(fd, IPPROTO_TCP, TCP_NODELAY, 1, "TCP_NODELAY"));
  KVF_TRY_VOID(set(fd, SOL_SOCKET, SO_KEEPALIVE, 1, "SO_KEEPALIVE"));
  KVF_TRY_VOID(set(fd, IPPROTO_TCP, TCP_KEEPIDLE, options.keepalive_idle_s, "TCP_KEEPIDLE"));
  KVF_TRY_VOID(set(fd, IPPROTO_TCP, TCP_KEEPINTVL, options.keepalive_interval_s, "TCP_KEEPINTVL"));
  KVF_TRY_VOID(set(fd, IPPROTO_TCP, TCP_KEEPCNT, options.keepalive_probes, "TCP_KEEPCNT"));
  KVF_TRY_VOID(set(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, options.user_timeout_ms, "TCP_USER_TIMEOUT"));
  return choose_congestion(fd, options.congestion);
}

Error socket_error(int fd, const std::string& what) {
  int pending = 0;
  socklen_t bytes = sizeof pending;
  if (::getsockopt(fd, SOL_SOCKET, SO_ERROR, &pending, &bytes) != 0) {
    pending = errno;
  }
  if (pending == 0) {
    return Error{Code::kPeerLost, fmt::format("{}: the connection was closed", what)};
  }
  Error error = errno_error(what, pending);
  error.code = Code::kPeerLost;
  return error;
}

Result<std::uint16_t> local_port(int fd) {
  sockaddr_storage storage = {};
  socklen_t bytes = sizeof storage;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&storage), &bytes) != 0) {
    return fail(errno_error("getsockname", errno));
  }
  in_port_t port = 0;
  if (storage.ss_family == AF_INET6) {
    port = reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_port;
  } else {
    port = reinterpret_cast<const sockaddr_in*>(&storage)->sin_port;
  }
  return ntohs(port);
}

bool is_wildcard(const std::string& host) {
  in_addr v4 = {};
  in6_addr v6 = {};
  if (::inet_pton(AF_INET, host.c_str(), &v4) == 1) {
    return v4.s_addr == INADDR_ANY;
  }
  return ::inet_pton(AF_INET6, host.c_str(), &v6) == 1 && IN6_IS_ADDR_UNSPECIFIED(&v6);
}

void reset_on_close(int fd) {
  const linger now = {1, 0};
  (void)::setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof now);
}

}  // namespace kvferry
