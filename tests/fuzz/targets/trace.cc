// A trace file: what parses is printed to a text that parses to the same requests.

#include "tools/cli/demo/trace.h"
#include "tests/fuzz/fuzz.h"

namespace kvferry::fuzz {

std::vector<std::string> seeds() {
  return {print_trace(generate_trace(4, 1)),
          "{\"timestamp\": 0, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": [0]}\r\n\n \t\n"};
}

}  // namespace kvferry::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvferry;
  constexpr std::uint64_t kRows = 1000;
  const auto trace = parse_trace(fuzz::text_of(data, size), "input", kRows);
  if (!trace) {
    KVF_CHECK(trace.error().message.starts_with("input:"));
    return 0;
  }
  KVF_CHECK(!trace->empty() && trace->size() <= kRows);
  const auto second = parse_trace(print_trace(*trace), "printed", kRows);
  KVF_CHECK(second && *second == *trace);
  return 0;
}
