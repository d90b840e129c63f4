#include "common/control/link.h"

namespace kvferry {
namespace {

constexpr std::size_t kNumberBytes = 8;

}  // namespace

std::string ControlLink::wrap(const ControlMessage& message) {
  ++sent_;
  std::string out;
  for (unsigned shift = 0; shift < 64; shift += 8) {
    out.push_back(static_cast<char>(sent_ >> shift & 0xFF));
  }
  return out + encode(message);
}

Result<ControlMessage> ControlLink::unwrap(std::int64_t now, std::string_view bytes) {
  if (bytes.size() < kNumberBytes) {
    return fail(Code::kProtocol, "a control message of {} bytes, at least {} are its number", bytes.size(),
                kNumberBytes);
  }
  std::uint64_t number = 0;
  for (unsigned i = 0; i < kNumberBytes; ++i) {
    number |= std::uint64_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
  }
  if (number != received_ + 1) {
    return fail(Code::kProtocol,
                "control message {} came where {} was next: the channel lost, repeated or reordered one",
                number, received_ + 1);
  }
  KVF_TRY(ControlMessage message, decode_control(bytes.substr(kNumberBytes)));
  ++received_;
  last_heard_ = now;
  return message;
}

std::optional<Error> ControlLink::silence(std::int64_t now) const {
  if (now - last_heard_ <= silence_max_) {
    return std::nullopt;
  }
  return Error{Code::kPeerLost,
               fmt::format("no heartbeat for {:.1f} s", static_cast<double>(now - last_heard_) / 1e9)};
}

}  // namespace kvferry
