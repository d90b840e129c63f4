// Requests to the bootstrap server, three pieces each (method, target, body), one after the other on one
// registry: each has an answer of a known status, a refusal says why, and the tables stay within their
// limits.

#include <algorithm>

#include "common/bootstrap/routes.h"
#include "common/http/target.h"
#include "tests/fuzz/fuzz.h"

namespace kvferry::fuzz {
namespace {

constexpr std::int64_t kSecond = 1'000'000'000;

std::string request(std::string_view method, std::string_view target, std::string_view body = "") {
  return piece(method) + piece(target) + piece(body);
}

std::string place(int dp, int cp, int tp, int pp) {
  return fmt::format("/route?prefill_dp_rank={}&prefill_cp_rank={}&target_tp_rank={}&target_pp_rank={}", dp,
                     cp, tp, pp);
}

std::string registration(int tp) {
  return fmt::format(
      R"({{"attn_tp_size":2,"attn_tp_rank":{},"attn_cp_size":1,"attn_cp_rank":0,"attn_dp_size":1,)"
      R"("attn_dp_rank":0,"pp_size":1,"pp_rank":0,"system_dp_size":1,"system_dp_rank":0,)"
      R"("rank_ip":"2001:db8::7","rank_port":"4321","page_size":64,"kv_cache_dtype":"bf16",)"
      R"("load_balance_method":"round_robin","prefill_http_port":null}})",
      tp);
}

}  // namespace

std::vector<std::string> seeds() {
  return {request("PUT", "/route", registration(0)) + request("GET", place(-1, -1, -1, -1)) +
              request("PUT", "/route", registration(1)) + request("GET", place(-1, -1, -1, -1)) +
              request("GET", place(0, 0, 1, 0)) + request("GET", place(0, 0, 9, 0)),
          request("POST", "/register_dp_rank", R"({"bootstrap_room":9223372036854775807,"dp_rank":3})") +
              request("POST", "/query_dp_ranks", R"({"bootstrap_rooms":[1,9223372036854775807]})"),
          request("GET", "/health") + request("DELETE", "/route") + request("GET", "/v1/status")};
}

}  // namespace kvferry::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvferry;
  Registry registry(RegistryOptions{.rooms_max = 8, .ranks_max = 64});
  BootstrapRoutes routes(registry);
  std::int64_t now = 0;
  for (fuzz::Input input(data, size); !input.empty();) {
    const std::string_view method = input.piece();
    const auto target = parse_target(input.piece());
    const std::string_view body = input.piece();
    now += 20 * fuzz::kSecond;
    if (!target) {
      continue;
    }
    const auto answer = routes.handle(method, target->path, target->query, body, now);
    if (!answer) {
      continue;
    }
    constexpr int kStatuses[] = {200, 400, 404, 405, 409, 413, 429, 503};
    KVF_CHECK(std::ranges::find(kStatuses, answer->status) != std::end(kStatuses));
    KVF_CHECK(!answer->body.empty() && !answer->content_type.empty());
    KVF_CHECK(answer->allow.empty() == (answer->status != 405));
    KVF_CHECK(registry.registered() <= 64);
  }
  return 0;
}
