// The target of a request line: path and query survive being encoded and parsed again.

#include "common/http/target.h"
#include "tests/fuzz/fuzz.h"

namespace kvferry::fuzz {

std::vector<std::string> seeds() {
  return {"/",
          "*",
          "/route?prefill_dp_rank=-1&target_tp_rank=0",
          "http://[::1]:8998/v1/status?a=b&a=c&=&d",
          "https://host?x=%41+b%2Bc",
          "/%7Euser/%C3%A9?%3D=%26&&",
          "/a%00b",
          "/a%4",
          "/a%zz#"};
}

}  // namespace kvferry::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvferry;
  const auto target = parse_target(fuzz::text_of(data, size));
  if (!target) {
    KVF_CHECK(target.error().code == Code::kInvalid);
    fuzz::check_reason(target.error());
    return 0;
  }
  if (target->path == "*") {
    return 0;
  }
  KVF_CHECK(target->path.starts_with('/'));
  std::string text = "/" + percent_encode(target->path.substr(1)) + "?";
  for (const auto& [key, value] : target->query) {
    text += percent_encode(key) + "=" + percent_encode(value) + "&";
  }
  const auto second = parse_target(text);
  KVF_CHECK(second && second->path == target->path && second->query == target->query);
  return 0;
}
