#pragma once
// One WebSocket with binary messages between two daemons: ordered, bounded, and with a clear end. It has no
// heartbeat of its own (the daemons have one). Thread: the io_context's, which must outlive the channel.
//
//   open --start()--> messages ... --close(), error, peer's close--> on_closed, once, the last callback
//
// Messages that arrive before start() wait in the connection. Dropping the last shared_ptr cuts the
// connection and silences the callbacks; after close() it lets what was accepted for sending still leave.
// Callbacks must not own the channel (capture it weakly).

#include <boost/asio/io_context.hpp>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/base/host_port.h"
#include "common/base/result.h"
#include "common/http/pending.h"

namespace kvferry {

struct ChannelLimits {
  std::uint64_t message_bytes_max = 4 << 20;      // one message, either direction
  std::uint64_t queue_bytes_max = 64 << 20;       // accepted by send() and not yet written
  std::chrono::milliseconds close_timeout{2000};  // for close(): flush and the peer's answer
};

class ChannelCore;

class Channel {
 public:
  using OnMessage = std::function<void(std::string_view)>;  // the bytes are valid during the call
  using OnClosed = std::function<void(Error)>;

  explicit Channel(std::shared_ptr<ChannelCore> core);  // for accept_channel and connect_channel
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  /// To be called once. `on_closed` gets
  ///   kPeerLost  the connection broke, or the peer closed it (its reason is in the message)
  ///   kProtocol  a text message, one above message_bytes_max, or not WebSocket at all
  ///   kAborted   close() was called here; the message is its reason
  /// Neither is ever called from inside start(), send() or close().
  void start(OnMessage on_message, OnClosed on_closed);

  /// Queues one message. kExhausted: the queue is full, nothing was queued. kInvalid: larger than
  /// message_bytes_max, will never fit. kUnavailable: closed or closing.
  Result<void> send(std::string message);

  /// Sends what is queued, then closes, within close_timeout in all; nothing is delivered any more. Repeated
  /// calls do nothing. `reason` travels to the peer (123 bytes of printable ASCII of it).
  void close(std::string reason);

  /// address:port of the other end.
  const std::string& remote() const;
  std::uint64_t queued_bytes() const;
  bool is_open() const;

 private:
  std::shared_ptr<ChannelCore> core_;
};

/// Connects to a server's upgrade path. `done` is called once, from the io_context and never from inside this
/// call. Errors: kDeadline, kUnavailable (name unknown, refused, lost), kInvalid (cannot be sent), kAborted
/// (the returned handle), and for an answer that is not an upgrade the kind that its status stands for (401
/// and 403 kUnauthorized, 404 kNotFound, 409 kConflict, 422 kMismatch, 429 kExhausted, 503 kUnavailable, else
/// kProtocol), with its body in the message.
std::shared_ptr<Pending> connect_channel(boost::asio::io_context& io, const HostPort& to, std::string target,
                                         std::vector<std::pair<std::string, std::string>> headers,
                                         std::chrono::milliseconds timeout,
                                         std::function<void(Result<std::shared_ptr<Channel>>)> done,
                                         ChannelLimits limits = {});

}  // namespace kvferry
