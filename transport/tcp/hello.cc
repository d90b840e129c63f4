#include "transport/tcp/hello.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "common/base/hex.h"
#include "common/base/random.h"

namespace kvferry {
namespace {

constexpr std::array<std::byte, 4> kHelloMagic{std::byte{'K'}, std::byte{'V'}, std::byte{'B'},
                                               std::byte{'H'}};
constexpr std::array<std::byte, 4> kWelcomeMagic{std::byte{'K'}, std::byte{'V'}, std::byte{'B'},
                                                 std::byte{'O'}};
constexpr std::uint8_t kVersion = 1;

Result<void> check_start(std::span<const std::byte> data, const std::array<std::byte, 4>& magic) {
  if (!std::equal(magic.begin(), magic.end(), data.begin())) {
    return fail(Code::kProtocol, "the other end does not speak this protocol: wrong magic");
  }
  const int version = static_cast<int>(data[4]) | static_cast<int>(data[5]) << 8;
  if (version != kVersion) {
    return fail(Code::kProtocol, "stream version is {}, but must be {}", version, kVersion);
  }
  return {};
}

int hex_digit(char c) {
  if (c >= '0' && c <= '9') {
    return c - '0';
  }
  return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

bool parse_hex(const std::string& text, TcpToken& token) {
  if (text.size() != 2 * token.size()) {
    return false;
  }
  for (std::size_t i = 0; i < token.size(); ++i) {
    const int high = hex_digit(text[2 * i]);
    const int low = hex_digit(text[2 * i + 1]);
    if (high < 0 || low < 0) {
      return false;
    }
    token[i] = static_cast<std::byte>(high * 16 + low);
  }
  return true;
}

}  // namespace

std::array<std::byte, kHelloBytes> encode_hello(const TcpHello& hello) {
  std::array<std::byte, kHelloBytes> data = {};
  std::copy(kHelloMagic.begin(), kHelloMagic.end(), data.begin());
  data[4] = std::byte{kVersion};
  data[6] = std::byte{hello.index};
  data[7] = std::byte{hello.count};
  std::copy(hello.token.begin(), hello.token.end(), data.begin() + 8);
  return data;
}

Result<TcpHello> decode_hello(std::span<const std::byte, kHelloBytes> data) {
  KVF_TRY_VOID(check_start(data, kHelloMagic));
  TcpHello hello;
  hello.index = static_cast<std::uint8_t>(data[6]);
  hello.count = static_cast<std::uint8_t>(data[7]);
  if (hello.count == 0 || hello.count > kTcpStreamsMax || hello.index >= hello.count) {
    return fail(Code::kProtocol, "stream {} of {}, but at most {} are allowed", hello.index, hello.count,
                kTcpStreamsMax);
  }
  std::copy(data.begin() + 8, data.end(), hello.token.begin());
  return hello;
}

std::array<std::byte, kWelcomeBytes> encode_welcome() {
  std::array<std::byte, kWelcomeBytes> data = {};
  std::copy(kWelcomeMagic.begin(), kWelcomeMagic.end(), data.begin());
  data[4] = std::byte{kVersion};
  return data;
}

Result<void> decode_welcome(std::span<const std::byte, kWelcomeBytes> data) {
  return check_start(data, kWelcomeMagic);
}

TcpToken random_token() {
  TcpToken token;
  fill_random(token);
  return token;
}

bool tokens_equal(const TcpToken& a, const TcpToken& b) {
  std::byte difference{0};
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference |= a[i] ^ b[i];
  }
  return difference == std::byte{0};
}

FabricOffer to_fabric_offer(const TcpOffer& offer) {
  const nlohmann::json json = {{"host", offer.host}, {"port", offer.port}, {"token", to_hex(offer.token)}};
  return FabricOffer{FabricKind::kTcp, json.dump()};
}

Result<TcpOffer> parse_tcp_offer(const FabricOffer& offer) {
  if (offer.kind != FabricKind::kTcp) {
    return fail(Code::kInvalid, "the offer is for fabric {}, not tcp", to_string(offer.kind));
  }
  const nlohmann::json json = nlohmann::json::parse(offer.json, nullptr, false);
  if (!json.is_object()) {
    return fail(Code::kInvalid, "the tcp offer is not a JSON object");
  }
  TcpOffer result;
  const auto host = json.find("host");
  if (host == json.end() || !host->is_string()) {
    return fail(Code::kInvalid, "the tcp offer has no text field 'host'");
  }
  result.host = host->get<std::string>();
  const auto port = json.find("port");
  if (port == json.end() || !port->is_number_unsigned() || port->get<std::uint64_t>() == 0 ||
      port->get<std::uint64_t>() > 65535) {
    return fail(Code::kInvalid, "the tcp offer's 'port' is not in 1..65535");
  }
  result.port = port->get<std::uint16_t>();
  const auto token = json.find("token");
  if (token == json.end() || !token->is_string() || !parse_hex(token->get<std::string>(), result.token)) {
    return fail(Code::kInvalid, "the tcp offer's 'token' is not 32 lower-case hex digits");
  }
  return result;
}

}  // namespace kvferry
