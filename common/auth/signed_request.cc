#include "common/auth/signed_request.h"

#include <charconv>

#include "common/base/hex.h"

namespace kvferry {
namespace {

constexpr std::string_view kVersion = "v1";
constexpr std::size_t kNonceSize = 32;
constexpr std::size_t kMacSize = 64;
constexpr std::string_view kFix = "set auth.key_file to the same key on both sides";

std::string code_of(const SharedKey& key, std::string_view method, std::string_view target,
                    std::string_view body, std::string_view time, std::string_view nonce) {
  return to_hex(key.mac("request", {method, target, time, nonce, body}));
}

struct Parts {
  std::string_view time;
  std::string_view nonce;
  std::string_view mac;
  UnixMillis millis = 0;
};

bool split(std::string_view header, Parts& parts) {
  std::vector<std::string_view> words;
  while (!header.empty()) {
    const std::size_t end = std::min(header.find(' '), header.size());
    words.push_back(header.substr(0, end));
    header.remove_prefix(std::min(end + 1, header.size()));
  }
  if (words.size() != 4 || words[0] != kVersion || words[2].size() != kNonceSize ||
      words[3].size() != kMacSize) {
    return false;
  }
  parts = {words[1], words[2], words[3], 0};
  const auto [end, error] =
      std::from_chars(parts.time.data(), parts.time.data() + parts.time.size(), parts.millis);
  return error == std::errc{} && end == parts.time.data() + parts.time.size() && parts.millis >= 0;
}

}  // namespace

UnixMillis unix_now() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

SignedRequest sign_request(const SharedKey& key, std::string_view method, std::string_view target,
                           std::string_view body, UnixMillis now) {
  SignedRequest out;
  out.nonce = random_hex();
  const std::string time = std::to_string(now);
  out.header = {std::string(kAuthHeader), fmt::format("{} {} {} {}", kVersion, time, out.nonce,
                                                      code_of(key, method, target, body, time, out.nonce))};
  return out;
}

std::string sign_reply(const SharedKey& key, std::string_view nonce, int status, std::string_view body) {
  return to_hex(key.mac("reply", {nonce, std::to_string(status), body}));
}

Result<void> check_reply(const SharedKey& key, std::string_view nonce, int status, std::string_view body,
                         std::string_view header) {
  if (!same_mac(header, sign_reply(key, nonce, status, body))) {
    return fail(Code::kUnauthorized, "the answer (status {}) is {}: {}", status,
                header.empty() ? "not signed" : "not signed with this key", kFix);
  }
  return {};
}

RequestGuard::RequestGuard(std::shared_ptr<const SharedKey> key, std::chrono::milliseconds window,
                           std::size_t nonces_max)
    : key_(std::move(key)), window_ms_(window.count()), nonces_max_(nonces_max) {}

Result<std::string> RequestGuard::check(std::string_view method, std::string_view target,
                                        std::string_view body, std::string_view header, UnixMillis now) {
  if (header.empty()) {
    return fail(Code::kUnauthorized, "{} {} is not signed; {}", method, target, kFix);
  }
  Parts parts;
  if (!split(header, parts)) {
    return fail(Code::kUnauthorized, "{} is not '{} TIME NONCE MAC'", kAuthHeader, kVersion);
  }
  // The code first: what is not from a holder of the key learns nothing about clocks and nonces.
  if (!same_mac(parts.mac, code_of(*key_, method, target, body, parts.time, parts.nonce))) {
    return fail(Code::kUnauthorized, "{} {} is not signed with this key; {}", method, target, kFix);
  }
  if (parts.millis < now - window_ms_ || parts.millis > now + window_ms_) {
    return fail(Code::kUnauthorized,
                "the request was signed {} ms {} by this host's clock, auth.window is {} ms; set the clocks",
                parts.millis < now ? now - parts.millis : parts.millis - now,
                parts.millis < now ? "ago" : "ahead", window_ms_);
  }
  while (!order_.empty() && order_.front().first < now) {
    seen_.erase(order_.front().second);
    order_.pop_front();
  }
  if (seen_.contains(std::string(parts.nonce))) {
    return fail(Code::kUnauthorized, "the request was received before: a replay");
  }
  if (seen_.size() >= nonces_max_) {
    return fail(Code::kExhausted, "{} signed requests within two windows; try again later", seen_.size());
  }
  std::string nonce(parts.nonce);
  seen_.insert(nonce);
  order_.emplace_back(now + 2 * window_ms_, nonce);
  return nonce;
}

}  // namespace kvferry
