#pragma once
// Both ends of a tcp fabric for a test, and a bare socket that can say anything to either of them.

#include <catch2/catch.hpp>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tests/support/fabric_fixture.h"
#include "transport/block.h"
#include "transport/tcp/hello.h"
#include "transport/tcp/tcp_receive_fabric.h"
#include "transport/tcp/tcp_send_fabric.h"

namespace kvferry::test {

inline std::unique_ptr<TcpReceiveFabric> make_receive(EventLog& log, TcpReceiveConfig config = {}) {
  auto fabric = TcpReceiveFabric::create(std::move(config), log.sink());
  REQUIRE(fabric.has_value());
  return *std::move(fabric);
}

inline std::unique_ptr<TcpSendFabric> make_send(EventLog& log, const TcpSendConfig& config = {}) {
  auto fabric = TcpSendFabric::create(config, log.sink());
  REQUIRE(fabric.has_value());
  return *std::move(fabric);
}

struct TcpEnds {
  explicit TcpEnds(const TcpSendConfig& send_config = {}, const TcpReceiveConfig& receive_config = {})
      : receive(make_receive(receive_log, receive_config)), send(make_send(send_log, send_config)) {}

  EventLog send_log;
  EventLog receive_log;
  std::unique_ptr<TcpReceiveFabric> receive;
  std::unique_ptr<TcpSendFabric> send;
};

/// A blocking client socket on loopback; every wait has a generous bound.
class RawPeer {
 public:
  explicit RawPeer(std::uint16_t port) : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    REQUIRE(::connect(fd_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
    bound();
  }
  explicit RawPeer(UniqueFd accepted) : fd_(std::move(accepted)) { bound(); }

  /// False when the other end is gone.
  bool write(std::span<const std::byte> data) {
    while (!data.empty()) {
      const ssize_t sent = ::send(fd_.get(), data.data(), data.size(), MSG_NOSIGNAL);
      if (sent <= 0) {
        return false;
      }
      data = data.subspan(static_cast<std::size_t>(sent));
    }
    return true;
  }
  bool write(const BlockHeader& header) {
    BlockBytes bytes;
    encode_block(header, bytes);
    return write(std::span<const std::byte>(bytes));
  }
  bool write(std::size_t count, std::byte value) {
    const std::vector<std::byte> data(count, value);
    return write(std::span<const std::byte>(data));
  }
  /// Exactly `data.size()` bytes; false at the end of the stream.
  bool read(std::span<std::byte> data) {
    while (!data.empty()) {
      const ssize_t got = ::recv(fd_.get(), data.data(), data.size(), 0);
      if (got <= 0) {
        return false;
      }
      data = data.subspan(static_cast<std::size_t>(got));
    }
    return true;
  }
  /// True when the other end closes or resets without sending anything more.
  bool is_closed_by_peer() {
    std::byte one{};
    return ::recv(fd_.get(), &one, 1, 0) == 0 || (errno == ECONNRESET);
  }
  bool greet(const FabricOffer& offer, std::uint8_t index = 0, std::uint8_t count = 1) {
    const auto parsed = parse_tcp_offer(offer);
    REQUIRE(parsed.has_value());
    std::array<std::byte, kWelcomeBytes> welcome;
    const auto hello = encode_hello(TcpHello{index, count, parsed->token});
    return write(std::span<const std::byte>(hello)) && read(welcome) && decode_welcome(welcome).has_value();
  }
  /// Sends a drain and waits for its answer: everything before it has been handled.
  bool sync(const TransferKey& key) {
    BlockBytes answer;
    if (!write(make_drain(key)) || !read(answer)) {
      return false;
    }
    const auto header = decode_block(answer);
    return header && header->type == BlockType::kDrained && header->key == key;
  }
  void reset() {
    const linger now = {1, 0};
    ::setsockopt(fd_.get(), SOL_SOCKET, SO_LINGER, &now, sizeof now);
    fd_.reset();
  }
  void close() { fd_.reset(); }
  int fd() const { return fd_.get(); }

 private:
  void bound() {
    const timeval limit = {30, 0};
    ::setsockopt(fd_.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    ::setsockopt(fd_.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  }
  UniqueFd fd_;
};

/// A listener that plays the receiver by hand.
class RawListener {
 public:
  RawListener() : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const int small = 64 << 10;  // so that a sender fills the connection soon
    ::setsockopt(fd_.get(), SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
    REQUIRE(::bind(fd_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
    REQUIRE(::listen(fd_.get(), 16) == 0);
  }
  FabricOffer offer() const {
    auto port = local_port(fd_.get());
    REQUIRE(port.has_value());
    return to_fabric_offer(TcpOffer{"127.0.0.1", *port, TcpToken{}});
  }
  /// Accepts and reads the hello.
  RawPeer accept() {
    RawPeer peer{UniqueFd(::accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC))};
    REQUIRE(peer.fd() >= 0);
    std::array<std::byte, kHelloBytes> hello;
    REQUIRE(peer.read(hello));
    REQUIRE(decode_hello(hello).has_value());
    return peer;
  }
  RawPeer accept_and_welcome() {
    RawPeer peer = accept();
    const auto welcome = encode_welcome();
    REQUIRE(peer.write(std::span<const std::byte>(welcome)));
    return peer;
  }

 private:
  UniqueFd fd_;
};

inline bool all_guard(const Pool& pool) {
  for (std::uint32_t b = 0; b < pool.buffer_count(); ++b) {
    // Equal to itself moved by one byte, and right at the start: one value throughout.
    const auto bytes = pool.buffer(b);
    if (bytes[0] != kDstGuard || std::memcmp(bytes.data(), bytes.data() + 1, bytes.size() - 1) != 0) {
      return false;
    }
  }
  return true;
}

inline void fill_guard(const Pool& pool) {
  for (std::uint32_t b = 0; b < pool.buffer_count(); ++b) {
    std::memset(pool.buffer(b).data(), static_cast<int>(kDstGuard), pool.buffer(b).size());
  }
}

}  // namespace kvferry::test
