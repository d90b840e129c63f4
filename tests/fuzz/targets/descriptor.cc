// The body of POST /v1/handshake: what decodes comes back the same, and the rules can judge it against a
// complete daemon, whatever it says, with a verdict that the peer can read.

#include "common/handshake/verdict.h"
#include "tests/fuzz/fuzz.h"
#include "tests/unit/handshake/samples.h"

namespace kvferry::fuzz {

std::vector<std::string> seeds() {
  std::vector<std::string> all;
  for (const auto& model : {samples::mha_model(), samples::mla_model()}) {
    const auto pair = samples::pair(model, samples::layout("tp=2"), samples::layout("tp=4"));
    all.push_back(encode_descriptor(pair.prefill));
    all.push_back(encode_descriptor(pair.decode));
  }
  std::mt19937_64 random(1);
  for (int i = 0; i < 4; ++i) {
    all.push_back(encode_descriptor(samples::random_descriptor(random)));
  }
  return all;
}

}  // namespace kvferry::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvferry;
  static const Descriptor ours =
      samples::daemon(Role::kPrefill, samples::mla_model(), samples::layout("tp=2"));
  const auto peer = decode_descriptor(fuzz::text_of(data, size));
  if (!peer) {
    KVF_CHECK(peer.error().code == Code::kInvalid);
    fuzz::check_reason(peer.error());
    return 0;
  }
  const std::string again = encode_descriptor(*peer);
  const auto second = decode_descriptor(again);
  KVF_CHECK(second && samples::same(*second, *peer) && encode_descriptor(*second) == again);
  const Verdict verdict = judge(ours, *peer, 7);
  const auto read = decode_verdict(encode_verdict(verdict));
  KVF_CHECK(read && read->accepted == verdict.accepted && read->rank_map == verdict.rank_map);
  return 0;
}
