// A daemon's configuration: any text is either a configuration whose printed form reads back as itself, or
// refused with a line per problem. The first byte chooses the side.

#include "common/daemon/config.h"
#include "tests/fuzz/fuzz.h"

namespace kvferry::fuzz {
namespace {

Role role_of(char side) {
  return side == 'p' ? Role::kPrefill : Role::kDecode;
}

}  // namespace

std::vector<std::string> seeds() {
  std::vector<std::string> all;
  for (const char side : {'p', 'd'}) {
    for (const char* text :
         {R"({"model": "deepseek-v3"})",
          R"({"model": "llama-3.1-70b", "dtype": "fp8_e4m3", "topology": {"tp": 8, "pp": 2, "dp": 2}})",
          R"({"model": "deepseek-v3.2", "page_size": 64, "fabrics": ["tcp"], "log": {"level": "debug"}})"}) {
      const auto config = parse_daemon_config(role_of(side), text, "seed");
      KVF_CHECK(config.has_value());
      all.push_back(side + std::string(text));
      all.push_back(side + print_daemon_config(role_of(side), *config));
    }
    all.push_back(side +
                  std::string(R"({"model": "x", /* why */ "timeouts": {"drain": "1.5s"}, "ranks": [0, 0]})"));
  }
  return all;
}

}  // namespace kvferry::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvferry;
  fuzz::Input input(data, size);
  const Role role = fuzz::role_of(static_cast<char>(input.byte()));
  const auto config = parse_daemon_config(role, input.rest(), "input");
  if (!config) {
    fuzz::check_reason(config.error());
    KVF_CHECK(config.error().message.find("input") != std::string::npos);
    return 0;
  }
  const std::string printed = print_daemon_config(role, *config);
  const auto second = parse_daemon_config(role, printed, "printed");
  KVF_CHECK(second && print_daemon_config(role, *second) == printed);
  return 0;
}
