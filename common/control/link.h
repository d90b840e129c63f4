#pragma once
// One end of a control channel as pure arithmetic: it numbers what it sends, checks the numbers of what
// arrives, and knows when the other end has been silent for too long. The channel below it is ordered and
// complete, or it is not used any more: a message that is lost, repeated, reordered or cut would otherwise
// leave the two daemons with different beliefs about whose pages are whose.
//
// On the wire a message is its number (64-bit little-endian, from 1) and the MessagePack of messages.h;
// between daemons that share a key, then 16 bytes of a MAC over both, with a key of this direction of this
// session.

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "common/auth/shared_key.h"
#include "common/base/result.h"
#include "common/control/messages.h"

namespace kvferry {

/// The keys of one session: whoever changes, adds or moves a message ends it.
struct LinkKeys {
  std::shared_ptr<const SharedKey> send;  // null: no codes
  std::shared_ptr<const SharedKey> receive;
};
/// `session` is the verdict's; both daemons derive the same two keys from the key they share (null: none).
LinkKeys link_keys(const SharedKey* key, std::uint64_t session, bool is_prefill);

class ControlLink {
 public:
  /// `now` is a steady clock's nanoseconds, here and below.
  ControlLink(std::int64_t now, std::chrono::nanoseconds silence_max, LinkKeys keys = {})
      : keys_(std::move(keys)), silence_max_(silence_max.count()), last_heard_(now) {}

  /// The bytes of the next message to send.
  std::string wrap(const ControlMessage& message);
  /// kProtocol: not the next message, or not one at all; the session has to end.
  Result<ControlMessage> unwrap(std::int64_t now, std::string_view bytes);
  /// kPeerLost when nothing was heard for longer than silence_max.
  std::optional<Error> silence(std::int64_t now) const;
  std::string heartbeat() { return wrap(message::Heartbeat{sent_ + 1}); }

 private:
  LinkKeys keys_;
  std::int64_t silence_max_;
  std::int64_t last_heard_;
  std::uint64_t sent_ = 0;
  std::uint64_t received_ = 0;
};

}  // namespace kvferry
