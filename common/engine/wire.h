#pragma once
// The messages of the engine socket, and their encoding. Both ends (EngineServer and libkvferry) use this
// file.
//
// A frame's body is a MessagePack map with "op" and, on requests, "seq" and "fds":
//   engine -> daemon   attach, send, expect, abort: answered by one reply with the same seq; detach: by the
//   end daemon -> engine   reply {seq, code, message}; event {type, room, tokens, bytes, transfer_ns, code,
//   reason, layer_end}
// Page lists travel as a binary of little-endian uint32. Descriptors (SCM_RIGHTS) are sent with the first
// byte of their frame, and "fds" says how many belong to it. Unknown, missing and repeated keys are errors.
//
// Decoding errors: kProtocol means that the frame is not what a correct client sends (the connection ends);
// kInvalid means that one value is not legal (that call alone is refused).

#include <cstddef>
#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/ids.h"
#include "common/base/result.h"
#include "common/engine/wire_frame.h"
#include "common/pool/pool.h"
#include "common/topology/topology.h"

namespace kvferry::wire {

/// Raised when a frame changes its meaning. The daemon refuses an attach with another number.
inline constexpr std::uint32_t kProtocol = 1;
inline constexpr std::size_t kFdsMax = 64;  // on one attach; a send carries at most one
inline constexpr std::size_t kBuffersMax = 4096;
inline constexpr std::size_t kAuxFieldsMax = 256;
inline constexpr std::size_t kNameBytesMax = 128;  // aux field names, dtype
inline constexpr std::size_t kBootstrapBytesMax = 512;
inline constexpr std::size_t kReasonBytesMax = 511;         // kvf_event::reason less its NUL
inline constexpr std::size_t kMessageBytesMax = 16 * 1024;  // a reply's message; longer ones are cut
/// What a client accepts from its daemon; a reply or event is far smaller.
inline constexpr std::uint32_t kReplyFrameBytesMax = 256u << 10;

enum class Op : std::uint8_t { kAttach, kSend, kExpect, kAbort, kDetach, kReply, kEvent };
std::string_view to_string(Op op);

struct Attach {
  std::uint32_t protocol = kProtocol;
  RankCoord coord;
  std::string dtype;
  PoolLayout layout;  // rank is not on the wire
};
struct Send {
  Room room = 0;
  std::vector<std::uint32_t> pages;
  std::uint64_t first_token = 0;
  std::uint64_t token_count = 0;
  bool last = false;
  int aux_slot = -1;
  bool begun = false;  // as in Abort
  HybridRows hybrid = {};
  std::uint32_t layer_begin = 0;  // both 0: all layers
  std::uint32_t layer_end = 0;
};
struct Expect {
  Room room = 0;
  std::string bootstrap;
  std::vector<std::uint32_t> pages;
  std::uint64_t prefix = 0;
  std::uint64_t token_count = 0;
  int aux_slot = -1;
  int prefill_dp_rank = -1;
  HybridRows hybrid = {};
};
struct Abort {
  Room room = 0;
  std::string reason;
  bool begun = false;  // the client has sent or expected this use of the room and seen no end of it
};
/// seq 0: the daemon could not read the request's seq, or speaks before any request; the connection ends.
struct Reply {
  std::uint64_t seq = 0;
  std::uint8_t code = 0;  // 0, or a Code
  std::string message;
};
/// kvf_event_type from which on an event is the last one of its use of the room.
inline constexpr std::uint32_t kFirstFinalEvent = 3;
struct Event {
  std::uint32_t type = 0;  // kvf_event_type
  Room room = 0;
  std::uint64_t tokens = 0;
  std::uint64_t bytes = 0;
  std::uint64_t transfer_ns = 0;
  std::uint8_t code = 0;
  std::string reason;
  std::uint32_t layer_end = 0;  // of a chunk that was read; 0: all layers
};

/// Whole frames, length included.
std::string encode(std::uint64_t seq, const Attach& message, std::size_t fds);
std::string encode(std::uint64_t seq, const Send& message, std::size_t fds);
std::string encode(std::uint64_t seq, const Expect& message);
std::string encode(std::uint64_t seq, const Abort& message);
std::string encode_detach(std::uint64_t seq);
std::string encode(const Reply& message);
std::string encode(const Event& message);

/// A frame's body whose op, seq and descriptor count are known; the rest is decoded by the function of its
/// op.
class Envelope {
 public:
  Envelope();
  ~Envelope();
  Envelope(Envelope&&) noexcept;
  Envelope& operator=(Envelope&&) noexcept;

  Op op = Op::kDetach;
  std::uint64_t seq = 0;
  std::uint32_t fds = 0;

  const nlohmann::json& map() const { return *map_; }

 private:
  friend Result<Envelope> open(std::span<const std::byte> body);
  std::unique_ptr<nlohmann::json> map_;
};

Result<Envelope> open(std::span<const std::byte> body);

Result<Attach> decode_attach(const Envelope& envelope);
Result<Send> decode_send(const Envelope& envelope);
Result<Expect> decode_expect(const Envelope& envelope);
Result<Abort> decode_abort(const Envelope& envelope);
Result<void> decode_detach(const Envelope& envelope);
Result<Reply> decode_reply(const Envelope& envelope);
Result<Event> decode_event(const Envelope& envelope);

}  // namespace kvferry::wire
