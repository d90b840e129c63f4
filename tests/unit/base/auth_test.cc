// Signed requests, replies, sealed tokens and coded control messages between daemons that share a key.
#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>
#include <string>

#include "common/auth/sealed_token.h"
#include "common/auth/signed_request.h"
#include "common/base/hex.h"
#include "common/control/link.h"

using namespace kvferry;

namespace {

std::shared_ptr<const SharedKey> key_of(char letter) {
  const std::string secret(32, letter);
  return std::make_shared<const SharedKey>(std::as_bytes(std::span(secret)));
}

constexpr UnixMillis kNow = 1'800'000'000'000;
constexpr std::chrono::milliseconds kWindow{30'000};

std::string refusal(RequestGuard& guard, const SignedRequest& made, std::string_view method,
                    std::string_view target, std::string_view body, UnixMillis now) {
  const auto checked = guard.check(method, target, body, made.header.second, now);
  if (checked) {
    CHECK(*checked == made.nonce);
    return {};
  }
  CHECK((checked.error().code == Code::kUnauthorized || checked.error().code == Code::kExhausted));
  return checked.error().message;
}

}  // namespace

TEST_CASE("auth: HMAC-SHA256 over lengths and parts, as RFC 4231 and the wire form have it") {
  // Computed with another implementation: hmac(key = 32 x 'k', le64(len) || part for "request", "GET", "/").
  const auto key = key_of('k');
  CHECK(to_hex(key->mac("request", {"GET", "/"})) ==
        "83b223c15ced6f347f637051dd7ead2925d0e391c522e62660305c9e708cac91");
  CHECK(key->mac("a", {"bc"}) != key->mac("ab", {"c"}));
  CHECK(key->mac("a", {"b", "c"}) != key->mac("a", {"bc"}));
}

TEST_CASE("auth: a signed request is good once, as it is, and for a while") {
  const auto key = key_of('k');
  RequestGuard guard(key, kWindow);
  const auto sign = [&](UnixMillis at) { return sign_request(*key, "POST", "/v1/handshake", "{}", at); };
  const SignedRequest good = sign(kNow);
  CHECK(refusal(guard, good, "POST", "/v1/handshake", "{}", kNow + 100).empty());
  CHECK(refusal(guard, good, "POST", "/v1/handshake", "{}", kNow + 200) ==
        "the request was received before: a replay");
  const SignedRequest other = sign(kNow);
  for (const auto& [method, target, body] : {std::tuple{"PUT", "/v1/handshake", "{}"},
                                             {"POST", "/v1/handshake?", "{}"},
                                             {"POST", "/v1/handshake", "{ }"}}) {
    CHECK(refusal(guard, other, method, target, body, kNow).find("is not signed with this key") !=
          std::string::npos);
  }
  CHECK(refusal(guard, other, "POST", "/v1/handshake", "{}", kNow + 30'001).find("30001 ms ago") !=
        std::string::npos);
  CHECK(refusal(guard, other, "POST", "/v1/handshake", "{}", kNow - 30'001).find("30001 ms ahead") !=
        std::string::npos);
  CHECK(refusal(guard, other, "POST", "/v1/handshake", "{}", kNow + 30'000).empty());
  const auto foreign = sign_request(*key_of('x'), "GET", "/v1/topology", "", kNow);
  CHECK(refusal(guard, foreign, "GET", "/v1/topology", "", kNow).find("is not signed with this key") !=
        std::string::npos);
  for (const char* header : {"", "v1", "v2 1 2 3", "v1 x y z", "v1 1800000000000 00 00"}) {
    const auto checked = guard.check("GET", "/", "", header, kNow);
    REQUIRE_FALSE(checked);
    CHECK(checked.error().code == Code::kUnauthorized);
  }
}

TEST_CASE("auth: a replay is refused for as long as the request could be accepted, and not for ever") {
  const auto key = key_of('k');
  RequestGuard guard(key, kWindow, 4);
  const SignedRequest early = sign_request(*key, "GET", "/", "", kNow + 30'000);  // signed by a fast clock
  CHECK(refusal(guard, early, "GET", "/", "", kNow).empty());
  CHECK(refusal(guard, early, "GET", "/", "", kNow + 59'999) == "the request was received before: a replay");
  CHECK(refusal(guard, early, "GET", "/", "", kNow + 60'001).find("30001 ms ago") != std::string::npos);
  for (int i = 0; i < 4; ++i) {
    CHECK(refusal(guard, sign_request(*key, "GET", "/", "", kNow + 60'001), "GET", "/", "", kNow + 60'001)
              .empty());
  }
  CHECK(refusal(guard, sign_request(*key, "GET", "/", "", kNow + 60'001), "GET", "/", "", kNow + 60'001) ==
        "4 signed requests within two windows; try again later");
  CHECK(refusal(guard, sign_request(*key, "GET", "/", "", kNow + 130'000), "GET", "/", "", kNow + 130'000)
            .empty());
}

TEST_CASE("auth: an answer belongs to its request, status and body") {
  const auto key = key_of('k');
  const std::string reply = sign_reply(*key, "nonce", 200, "body");
  CHECK(check_reply(*key, "nonce", 200, "body", reply).has_value());
  CHECK_FALSE(check_reply(*key, "other", 200, "body", reply).has_value());
  CHECK_FALSE(check_reply(*key, "nonce", 422, "body", reply).has_value());
  CHECK_FALSE(check_reply(*key, "nonce", 200, "bodY", reply).has_value());
  CHECK_FALSE(check_reply(*key_of('x'), "nonce", 200, "body", reply).has_value());
  CHECK(check_reply(*key, "nonce", 200, "body", "").error().message.find("is not signed:") !=
        std::string::npos);
}

TEST_CASE("auth: a sealed token opens to itself, with the same key and for the same fabric only") {
  const auto key = key_of('k');
  const std::string offer = R"({"host":"10.0.0.1","port":7,"token":"00112233445566778899aabbccddeeff"})";
  const std::string sealed = seal_offer(*key, "tcp", offer);
  CHECK(sealed.find("00112233") == std::string::npos);
  CHECK(seal_offer(*key, "tcp", offer) != sealed);
  CHECK(nlohmann::json::parse(*open_offer(key.get(), "tcp", sealed)) == nlohmann::json::parse(offer));
  CHECK(nlohmann::json::parse(*open_offer(key.get(), "ucx", sealed)) != nlohmann::json::parse(offer));
  CHECK(nlohmann::json::parse(*open_offer(key_of('x').get(), "tcp", sealed)) != nlohmann::json::parse(offer));
  CHECK(open_offer(nullptr, "tcp", sealed).error().code == Code::kUnauthorized);
  CHECK(open_offer(key.get(), "tcp", offer).error().code == Code::kUnauthorized);
  CHECK(*open_offer(nullptr, "tcp", offer) == offer);
  for (const char* bad :
       {"", "x", "[]", R"({"token": 7, "sealed": "n"})", R"({"token": "xy", "sealed": "n"})"}) {
    CHECK((!open_offer(key.get(), "tcp", bad) || *open_offer(key.get(), "tcp", bad) == bad));
  }
}

TEST_CASE("auth: control messages are coded per session and direction, and numbered") {
  const auto key = key_of('k');
  const std::chrono::nanoseconds silence{1'000};
  const auto link = [&](const SharedKey* with, std::uint64_t session, bool prefill) {
    return ControlLink(0, silence, link_keys(with, session, prefill));
  };
  ControlLink prefill = link(key.get(), 7, true);
  ControlLink decode = link(key.get(), 7, false);
  const std::string first = prefill.wrap(message::Heartbeat{1});
  const std::string second = prefill.wrap(message::Heartbeat{2});
  std::string changed = first;
  changed[10] = static_cast<char>(changed[10] ^ 1);
  CHECK(decode.unwrap(1, changed).error().code == Code::kUnauthorized);
  CHECK(decode.unwrap(1, second).error().code == Code::kProtocol);
  CHECK(decode.unwrap(1, first).has_value());
  CHECK(decode.unwrap(1, first).error().code == Code::kProtocol);
  CHECK(decode.unwrap(1, second).has_value());
  // Its own messages sent back to it, another session's, another key's, and none.
  CHECK(prefill.unwrap(1, first).error().code == Code::kUnauthorized);
  CHECK(link(key.get(), 8, false).unwrap(1, first).error().code == Code::kUnauthorized);
  CHECK(link(key_of('x').get(), 7, false).unwrap(1, first).error().code == Code::kUnauthorized);
  CHECK(
      link(key.get(), 7, false).unwrap(1, link(nullptr, 7, true).wrap(message::Heartbeat{1})).error().code ==
      Code::kUnauthorized);
  for (const std::string& small : {std::string(), std::string(15, 'x'), std::string(16, 'x')}) {
    CHECK(link(key.get(), 7, false).unwrap(1, small).error().code == Code::kUnauthorized);
    CHECK(link(nullptr, 7, false).unwrap(1, small).error().code == Code::kProtocol);
  }
  CHECK_FALSE(decode.silence(1'001));
  CHECK(decode.silence(1'002)->message == "no heartbeat for 0.0 s");
}
