#pragma once
// Signed HTTP between daemons that share a key. A request carries
//
//   X-Kvferry-Auth: v1 TIME NONCE MAC     TIME: Unix time in milliseconds; MAC over method, target, TIME,
//   NONCE, body
//
// and its answer `X-Kvferry-Reply: MAC` over NONCE, status and body. A request is good once (its nonce is
// remembered for as long as its time is acceptable) and only within a window around this host's clock.
// Pure: the caller brings the time. Not thread safe.

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "common/auth/shared_key.h"
#include "common/base/result.h"

namespace kvferry {

inline constexpr std::string_view kAuthHeader = "x-kvferry-auth";
inline constexpr std::string_view kReplyHeader = "x-kvferry-reply";

/// Milliseconds of Unix time.
using UnixMillis = std::int64_t;
UnixMillis unix_now();

struct SignedRequest {
  std::pair<std::string, std::string> header;
  std::string nonce;  // for check_reply()
};
SignedRequest sign_request(const SharedKey& key, std::string_view method, std::string_view target,
                           std::string_view body, UnixMillis now);

/// The value of the reply's header.
std::string sign_reply(const SharedKey& key, std::string_view nonce, int status, std::string_view body);
/// kUnauthorized: the answer is not from a holder of the key, or not to this request.
Result<void> check_reply(const SharedKey& key, std::string_view nonce, int status, std::string_view body,
                         std::string_view header);

class RequestGuard {
 public:
  /// `nonces_max` requests can be accepted within two windows; more are refused (kExhausted), never
  /// forgotten.
  RequestGuard(std::shared_ptr<const SharedKey> key, std::chrono::milliseconds window,
               std::size_t nonces_max = 1 << 16);

  /// The nonce of a good request. kUnauthorized with the reason: unsigned, wrong code, too old or new,
  /// repeated.
  Result<std::string> check(std::string_view method, std::string_view target, std::string_view body,
                            std::string_view header, UnixMillis now);
  const SharedKey& key() const { return *key_; }

 private:
  std::shared_ptr<const SharedKey> key_;
  std::int64_t window_ms_;
  std::size_t nonces_max_;
  std::unordered_set<std::string> seen_;
  std::deque<std::pair<UnixMillis, std::string>> order_;  // when each may be forgotten
};

}  // namespace kvferry
