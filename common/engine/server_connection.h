#pragma once
// One engine's connection on the daemon's end: bytes to requests, requests to the handler, replies and events
// back. All on the io_context's thread. States: connected -> attached -> ending -> closed; an ending
// connection neither reads nor sends any more, and tells its owner from a posted function, so that nobody is
// called back from inside send_event().

#include <array>
#include <boost/asio/io_context.hpp>
#include <boost/asio/local/stream_protocol.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "common/engine/server.h"
#include "common/engine/server_requests.h"
#include "common/engine/server_socket.h"
#include "common/engine/wire.h"

namespace kvferry {

class EngineConnection : public std::enable_shared_from_this<EngineConnection> {
 public:
  /// Borrowed; outlives the connection until close() or the end callback.
  class Owner {
   public:
    virtual ~Owner() = default;
    virtual EngineHandler& handler() = 0;
    virtual void on_connection_end(EngineId engine, bool was_attached) = 0;
  };

  EngineConnection(boost::asio::io_context& io, const EngineServerOptions& options, Owner& owner, EngineId id,
                   PeerCredentials peer);

  /// Takes the connected, non-blocking socket and starts to read. Where that fails the socket stays the
  /// caller's, who can still say why.
  Result<void> start(UniqueFd& socket);
  /// Ignored unless the engine is alive. Calls nobody back.
  void send_event(const EngineEvent& event);
  /// Closes at once and forgets the owner.
  void close();

 private:
  enum class State { kConnected, kAttached, kEnding, kClosed };

  bool alive() const { return state_ == State::kConnected || state_ == State::kAttached; }
  void wait_readable();
  void read_some();
  void handle_frames();
  void handle_frame(std::span<const std::byte> body);
  Result<void> dispatch(const wire::Envelope& envelope, std::vector<UniqueFd> fds);
  Result<void> dispatch_attached(const wire::Envelope& envelope, std::vector<UniqueFd> fds);
  Result<void> attach(const wire::Envelope& envelope, std::vector<UniqueFd> fds);
  Result<std::vector<UniqueFd>> take_fds(std::uint32_t count);
  void reply(std::uint64_t seq, const Result<void>& outcome);
  void break_off(std::uint64_t seq, Error error);
  void queue(std::string frame);
  void flush();
  void end(const Error& reason);

  boost::asio::io_context& io_;
  const EngineServerOptions options_;
  Owner* owner_;
  const EngineId id_;
  const PeerCredentials peer_;
  boost::asio::local::stream_protocol::socket socket_;
  boost::asio::steady_timer attach_timer_;
  State state_ = State::kConnected;
  bool was_attached_ = false;
  bool malformed_ = false;  // set by dispatch: the request broke the protocol, not just a rule
  EngineLimits limits_;

  FrameBuffer frames_;
  std::vector<UniqueFd> fds_;  // arrived, not yet claimed by a frame; in order

  std::deque<std::string> out_;
  std::size_t out_sent_ = 0;  // bytes of out_.front() that are gone
  bool waiting_writable_ = false;
};

}  // namespace kvferry
