#pragma once
// For the HTTP tests: an io_context driven by the test thread, and a TCP peer that sends and records bytes
// exactly as told.

#include <array>
#include <boost/asio/connect.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/write.hpp>
#include <catch2/catch.hpp>
#include <chrono>
#include <memory>
#include <string>
#include <utility>

#include "common/base/host_port.h"

namespace kvferry::http_test {

using Tcp = boost::asio::ip::tcp;

inline constexpr std::chrono::seconds kLong{20};

/// Runs `io` until `done()`; false when that does not come true in time or nothing is left to run.
template <class Done>
bool run_until(boost::asio::io_context& io, Done done, std::chrono::milliseconds limit = kLong) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!done()) {
    if (io.stopped()) {
      io.restart();
    }
    if (io.run_one_until(end) == 0) {
      return done();
    }
  }
  return true;
}

/// The peer records everything until the other side ends the connection.
class RawPeer {
 public:
  RawPeer(boost::asio::io_context& io, const HostPort& to) : link_(std::make_shared<Link>(io)) {
    link_->socket.connect(Tcp::endpoint(boost::asio::ip::make_address(to.host), to.port));
    link_->socket.set_option(Tcp::no_delay(true));
    read(link_);
  }
  explicit RawPeer(Tcp::socket socket) : link_(std::make_shared<Link>(std::move(socket))) { read(link_); }
  RawPeer(const RawPeer&) = delete;
  RawPeer& operator=(const RawPeer&) = delete;
  ~RawPeer() { close(); }

  void send(std::string bytes) {
    auto kept = std::make_shared<std::string>(std::move(bytes));
    boost::asio::async_write(link_->socket, boost::asio::buffer(*kept),
                             [link = link_, kept](boost::system::error_code, std::size_t) {});
  }
  void send_now(std::string_view bytes) { boost::asio::write(link_->socket, boost::asio::buffer(bytes)); }
  void shutdown_send() {
    boost::system::error_code ignored;
    link_->socket.shutdown(Tcp::socket::shutdown_send, ignored);
  }
  void close() {
    boost::system::error_code ignored;
    link_->socket.close(ignored);
  }
  /// Closes with a reset instead of an orderly end.
  void reset() {
    link_->socket.set_option(boost::asio::socket_base::linger(true, 0));
    close();
  }

  const std::string& received() const { return link_->received; }
  bool ended() const { return link_->ended; }
  bool has(std::string_view text) const { return link_->received.find(text) != std::string::npos; }
  std::size_t count(std::string_view text) const {
    std::size_t found = 0;
    for (auto at = link_->received.find(text); at != std::string::npos;
         at = link_->received.find(text, at + text.size())) {
      ++found;
    }
    return found;
  }

 private:
  struct Link {
    explicit Link(boost::asio::io_context& io) : socket(io) {}
    explicit Link(Tcp::socket given) : socket(std::move(given)) {}
    Tcp::socket socket;
    std::array<char, 16384> chunk{};
    std::string received;
    bool ended = false;
  };

  static void read(const std::shared_ptr<Link>& link) {
    link->socket.async_read_some(boost::asio::buffer(link->chunk),
                                 [link](boost::system::error_code failed, std::size_t count) {
                                   link->received.append(link->chunk.data(), count);
                                   link->ended = static_cast<bool>(failed);
                                   if (!failed) {
                                     read(link);
                                   }
                                 });
  }

  std::shared_ptr<Link> link_;
};

inline const HostPort kAnyPort{.host = "127.0.0.1", .port = 0};

}  // namespace kvferry::http_test
