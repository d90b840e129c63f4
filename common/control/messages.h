#pragma once
// What two connected daemons say to each other beside the bytes: one MessagePack map per WebSocket message.
// The channel belongs to one session of two epochs, so nothing from an earlier life of either daemon can
// arrive on it; everything about a room names its generation.
//
//   decode -> prefill: RankUp, RankGone, Grant, Stop, Landed, Heartbeat
//   prefill -> decode: FabricStatus, TransferDigest, TransferFailed, TransferDrained, Heartbeat

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "common/base/ids.h"
#include "common/base/result.h"
#include "common/plan/plan.h"
#include "common/verify/digest.h"

namespace kvferry {

struct AuxShape {
  std::string name;
  std::uint32_t width = 0;
  std::uint32_t slots = 0;
  friend bool operator==(const AuxShape&, const AuxShape&) = default;
};

namespace message {
struct RankUp {  // a decode rank's engine is attached: the shape of its pool
  RankIndex rank = 0;
  std::uint32_t page_size = 0;
  std::vector<BufferShape> buffers;
  std::vector<AuxShape> aux;
};
struct RankGone {
  RankIndex rank = 0;
};
struct Grant {  // decode rank's destination for one room; valid until Stop or Landed
  GrantKey key;
  std::vector<RankIndex> targets;  // prefill ranks of this peer that take part, dummies included
  std::uint32_t prefill_dp = 0;
  std::vector<std::uint32_t> pages;
  std::uint64_t prefix = 0;
  std::uint64_t tokens = 0;
  bool has_aux = false;
  std::uint32_t aux_slot = 0;
  HybridRows hybrid = {};
  VerifyRate verify = kVerifyOff;  // what prefill is to send digests of
};
struct Stop {  // the room ended at decode without landing; answer with TransferDrained for every target
  GrantKey key;
  std::vector<RankIndex> targets;
  Code code = Code::kAborted;
  std::string reason;
};
struct Landed {  // every source of this grant has landed
  GrantKey key;
};
struct FabricStatus {  // which fabric prefill chose and connected; rooms flow from now on
  std::string kind;
  std::string carries;
};
struct TransferFailed {  // first reason of a transfer that will not complete
  TransferKey key;
  Code code = Code::kInternal;
  std::string reason;
};
struct TransferDrained {  // nothing of this transfer can land any more
  TransferKey key;
};
struct TransferDigest {  // of everything that one source meant to send
  TransferKey key;
  std::uint64_t tokens_end = 0;  // one past the last token that prefill computed
  Digest digest;                 // columns of the grant's grid
};
struct Heartbeat {
  std::uint64_t sequence = 0;
};
}  // namespace message

using ControlMessage = std::variant<message::RankUp, message::RankGone, message::Grant, message::Stop,
                                    message::Landed, message::FabricStatus, message::TransferFailed,
                                    message::TransferDrained, message::TransferDigest, message::Heartbeat>;

std::string encode(const ControlMessage& message);

/// Strict: every field present, of its type and within its range, rooms legal, texts and lists bounded;
/// fields of later versions are ignored. Texts come out clean (see clean_text.h), as they go into JSON and
/// logs. Errors (kProtocol) name the message and the field.
Result<ControlMessage> decode_control(std::string_view bytes);

}  // namespace kvferry
