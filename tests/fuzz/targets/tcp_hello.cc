// The first bytes of a tcp stream in either direction, and the offer inside the handshake.

#include <algorithm>

#include "tests/fuzz/fuzz.h"
#include "transport/tcp/hello.h"

namespace kvferry::fuzz {

std::vector<std::string> seeds() {
  const TcpToken token{std::byte{1}, std::byte{0xAB}};
  return {"h" + string_of(encode_hello({.index = 3, .count = 4, .token = token})),
          "w" + string_of(encode_welcome()),
          "o" + to_fabric_offer({.host = "2001:db8::7", .port = 4321, .token = token}).json};
}

namespace {

void check_hello(std::string_view text) {
  std::array<std::byte, kHelloBytes> bytes{};
  std::ranges::copy(bytes_of(text.substr(0, kHelloBytes)), bytes.begin());
  const auto hello = decode_hello(bytes);
  if (!hello) {
    KVF_CHECK(hello.error().code == Code::kProtocol);
    return check_reason(hello.error());
  }
  KVF_CHECK(hello->count >= 1 && hello->count <= kTcpStreamsMax && hello->index < hello->count);
  KVF_CHECK(encode_hello(*hello) == bytes);
}

void check_welcome(std::string_view text) {
  std::array<std::byte, kWelcomeBytes> bytes{};
  std::ranges::copy(bytes_of(text.substr(0, kWelcomeBytes)), bytes.begin());
  if (const auto welcome = decode_welcome(bytes); !welcome) {
    check_reason(welcome.error());
  }
}

void check_offer(std::string_view text) {
  const auto offer = parse_tcp_offer({FabricKind::kTcp, std::string(text)});
  if (!offer) {
    KVF_CHECK(offer.error().code == Code::kInvalid);
    return check_reason(offer.error());
  }
  const auto second = parse_tcp_offer(to_fabric_offer(*offer));
  KVF_CHECK(second && second->host == offer->host && second->port == offer->port);
  KVF_CHECK(tokens_equal(second->token, offer->token));
}

}  // namespace
}  // namespace kvferry::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  kvferry::fuzz::Input input(data, size);
  switch (input.byte()) {
    case 'h':
      kvferry::fuzz::check_hello(input.rest());
      return 0;
    case 'w':
      kvferry::fuzz::check_welcome(input.rest());
      return 0;
    default:
      kvferry::fuzz::check_offer(input.rest());
      return 0;
  }
}
