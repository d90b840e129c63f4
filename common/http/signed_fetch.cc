#include "common/http/signed_fetch.h"

#include <algorithm>

#include "common/base/clean_text.h"

namespace kvferry {
namespace {

constexpr std::size_t kShownBytesMax = 300;

Result<HttpResponse> checked(const SharedKey& key, const std::string& nonce, const std::string& where,
                             HttpResponse answer) {
  const auto header = std::find_if(answer.headers.begin(), answer.headers.end(),
                                   [](const auto& item) { return item.first == kReplyHeader; });
  const bool has = header != answer.headers.end();
  const auto good = check_reply(key, nonce, answer.status, answer.body, has ? header->second : "");
  if (good) {
    return answer;
  }
  if (!has && answer.status >= 400) {
    return fail(answer.status == 401 ? Code::kUnauthorized : Code::kUnavailable, "{} answers {}: {}", where,
                answer.status, clean_text(cut_text(answer.body, kShownBytesMax)));
  }
  return fail(good.error().code, "{}: {}", where, good.error().message);
}

}  // namespace

std::shared_ptr<Pending> signed_fetch(boost::asio::io_context& io, std::shared_ptr<const SharedKey> key,
                                      HttpFetch fetch, std::function<void(Result<HttpResponse>)> done) {
  if (!key) {
    return http_fetch(io, std::move(fetch), std::move(done));
  }
  SignedRequest made = sign_request(*key, fetch.method, fetch.target, fetch.body, unix_now());
  fetch.headers.push_back(std::move(made.header));
  const std::string where = fetch.to.to_string();
  return http_fetch(io, std::move(fetch),
                    [key = std::move(key), nonce = std::move(made.nonce), where,
                     done = std::move(done)](Result<HttpResponse> answer) {
                      done(answer ? checked(*key, nonce, where, *std::move(answer)) : std::move(answer));
                    });
}

}  // namespace kvferry
