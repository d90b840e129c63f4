#pragma once
// The first frames of a stream, and the offer that makes them possible.
//
//   sender:    "KVBH" | version u16 | index u8 | count u8 | token 16 bytes      (24 bytes)
//   receiver:  "KVBO" | version u16 | zero u16                                  (8 bytes)
//
// then blocks (transport/block.h) from the sender, and kDrained frames from the receiver. The token comes
// from the offer, inside the authenticated handshake; it admits one session of `count` streams.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "common/base/result.h"
#include "transport/fabric.h"

namespace kvferry {

using TcpToken = std::array<std::byte, 16>;
inline constexpr std::size_t kHelloBytes = 24;
inline constexpr std::size_t kWelcomeBytes = 8;
inline constexpr std::uint32_t kTcpStreamsMax = 16;

struct TcpHello {
  std::uint8_t index = 0;
  std::uint8_t count = 1;
  TcpToken token = {};
};

std::array<std::byte, kHelloBytes> encode_hello(const TcpHello& hello);
/// kProtocol for a wrong magic, version, or index.
Result<TcpHello> decode_hello(std::span<const std::byte, kHelloBytes> data);
std::array<std::byte, kWelcomeBytes> encode_welcome();
Result<void> decode_welcome(std::span<const std::byte, kWelcomeBytes> data);

TcpToken random_token();
/// Takes the same time wherever the first difference is.
bool tokens_equal(const TcpToken& a, const TcpToken& b);

struct TcpOffer {
  std::string host;  // numeric address, IPv6 without brackets
  std::uint16_t port = 0;
  TcpToken token = {};
};
FabricOffer to_fabric_offer(const TcpOffer& offer);
/// Errors (kInvalid) name the field.
Result<TcpOffer> parse_tcp_offer(const FabricOffer& offer);

}  // namespace kvferry
