#include "common/control/link.h"

#include <algorithm>

namespace kvferry {
namespace {

constexpr std::size_t kNumberBytes = 8;
constexpr std::size_t kMacBytes = 16;

std::string code_of(const SharedKey& key, std::string_view bytes) {
  const Mac mac = key.mac("control message", {bytes});
  return {reinterpret_cast<const char*>(mac.data()), kMacBytes};
}

}  // namespace

LinkKeys link_keys(const SharedKey* key, std::uint64_t session, bool is_prefill) {
  if (key == nullptr) {
    return {};
  }
  const std::string number = std::to_string(session);
  auto to_decode = key->derive("control link", {number, "to decode"});
  auto to_prefill = key->derive("control link", {number, "to prefill"});
  return is_prefill ? LinkKeys{std::move(to_decode), std::move(to_prefill)}
                    : LinkKeys{std::move(to_prefill), std::move(to_decode)};
}

std::string ControlLink::wrap(const ControlMessage& message) {
  ++sent_;
  std::string out;
  for (unsigned shift = 0; shift < 64; shift += 8) {
    out.push_back(static_cast<char>(sent_ >> shift & 0xFF));
  }
  out += encode(message);
  return keys_.send ? out + code_of(*keys_.send, out) : out;
}

Result<ControlMessage> ControlLink::unwrap(std::int64_t now, std::string_view bytes) {
  if (keys_.receive) {
    const std::size_t body = bytes.size() - std::min(bytes.size(), kMacBytes);
    if (!same_mac(bytes.substr(body), code_of(*keys_.receive, bytes.substr(0, body)))) {
      return fail(Code::kUnauthorized, "a control message of {} bytes is not coded with this session's key",
                  bytes.size());
    }
    bytes = bytes.substr(0, body);
  }
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
