// "host:port": what parses is printed to a text that parses to the same.

#include "common/base/host_port.h"
#include "tests/fuzz/fuzz.h"

namespace kvferry::fuzz {

std::vector<std::string> seeds() {
  return {"127.0.0.1:8998", "[2001:db8::5]:1", "fe80::1%lo", "host",  "host:0", "[::1]", "[::1]:", ":1",
          "a:b:c",          "host:65536",      "h:+1",       "[v]x:1"};
}

}  // namespace kvferry::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvferry;
  const std::string_view text = fuzz::text_of(data, size);
  for (const bool zero : {false, true}) {
    const auto parsed = parse_host_port(text, 8998, zero);
    if (!parsed) {
      fuzz::check_reason(parsed.error());
      continue;
    }
    KVF_CHECK(!parsed->host.empty() && (zero || parsed->port != 0));
    const auto second = parse_host_port(parsed->to_string(), std::nullopt, zero);
    KVF_CHECK(second && *second == *parsed);
    static_cast<void>(is_loopback(parsed->host));
  }
  return 0;
}
