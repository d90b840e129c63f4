#pragma once
// The engine's end of the engine socket: one request at a time, each waiting for its reply; events that
// arrive meanwhile are queued. Once the connection is broken every call reports why, after the queued events
// have been taken. One thread at a time.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_set>

#include "common/base/result.h"
#include "common/base/unique_fd.h"
#include "common/engine/wire.h"

namespace kvferry {

/// How long a daemon may take to answer. Its engine thread never waits for a peer, so this is long.
inline constexpr std::chrono::seconds kAnswerDeadline{10};

class ClientConnection {
 public:
  using Clock = std::chrono::steady_clock;

  /// kUnavailable when nobody listens, kUnauthorized when the socket may not be opened.
  static Result<std::unique_ptr<ClientConnection>> connect(const std::string& path);

  std::uint64_t next_seq() { return ++seq_; }
  /// Sends `frame` (which carries `seq`) and waits for its reply. The daemon's refusal comes back as it is;
  /// kUnavailable when the connection is or gets broken, kDeadline when no answer came (then it is broken,
  /// too).
  Result<void> call(std::uint64_t seq, std::string_view frame, std::span<const int> fds,
                    std::chrono::nanoseconds deadline);
  /// Sends without waiting for anything; what does not fit into the socket is dropped.
  void send_last_words(std::string_view frame);

  /// The next event, waiting up to `timeout_ms` (-1: for ever); nullopt when none came.
  Result<std::optional<wire::Event>> next_event(int timeout_ms);
  /// Which rooms this engine has begun and not been told the end of.
  void room_begun(Room room) { rooms_.insert(room); }
  bool room_is_begun(Room room) const { return rooms_.contains(room); }
  /// An epoll descriptor: readable while events are queued, the socket is readable, or all is over.
  int event_fd() const { return epoll_.get(); }

 private:
  ClientConnection() : in_(wire::kReplyFrameBytesMax) {}

  Result<void> open_event_fd();
  Result<void> write_all(std::string_view frame, std::span<const int> fds, Clock::time_point until);
  Result<void> wait_reply(std::uint64_t seq, Clock::time_point until);
  /// Reads what is there and takes every whole frame; false when the socket had nothing.
  Result<bool> read_some();
  Result<void> take_frames();
  Result<void> take_frame(std::span<const std::byte> body);
  /// Waits until the socket is ready; false at `until`.
  Result<bool> wait_socket(short what, std::optional<Clock::time_point> until);
  /// Remembers why nothing works any more, and returns it.
  tl::unexpected<Error> broken(std::string why);
  void update_event_fd();

  UniqueFd socket_;
  UniqueFd wake_;  // eventfd: non-zero while `events_` has something or the connection is broken
  UniqueFd epoll_;
  bool wake_is_set_ = false;
  FrameBuffer in_;
  std::deque<wire::Event> events_;
  std::unordered_set<Room> rooms_;
  std::optional<wire::Reply> reply_;
  std::optional<Error> broken_;
  std::uint64_t seq_ = 0;
};

}  // namespace kvferry
