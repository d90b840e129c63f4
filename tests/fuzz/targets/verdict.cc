// The answer to POST /v1/handshake, as decode reads it.

#include "common/handshake/verdict.h"
#include "tests/fuzz/fuzz.h"
#include "tests/unit/handshake/samples.h"

namespace kvferry::fuzz {

std::vector<std::string> seeds() {
  const auto fit =
      samples::pair(samples::mla_model(), samples::layout("tp=2"), samples::layout("tp=4,dcp=2"));
  const auto gqa = samples::pair(samples::mha_model(), samples::layout("tp=2"), samples::layout("tp=4"));
  return {encode_verdict(judge(fit.prefill, fit.decode, 4711)),
          encode_verdict(judge(gqa.prefill, gqa.decode, UINT64_MAX)),
          encode_verdict(judge(fit.prefill, gqa.decode, 1))};
}

}  // namespace kvferry::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvferry;
  const auto verdict = decode_verdict(fuzz::text_of(data, size));
  if (!verdict) {
    KVF_CHECK(verdict.error().code == Code::kInvalid);
    fuzz::check_reason(verdict.error());
    return 0;
  }
  KVF_CHECK(verdict->accepted ? !verdict->fabric.empty() : !verdict->violations.empty());
  for (const RankMapEntry& entry : verdict->rank_map) {
    for (const RankIndex target : entry.targets) {
      KVF_CHECK(target < verdict->prefill.topology.rank_count());
    }
  }
  const std::string again = encode_verdict(*verdict);
  const auto second = decode_verdict(again);
  KVF_CHECK(second && encode_verdict(*second) == again);
  return 0;
}
