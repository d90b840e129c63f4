// A control message of a peer daemon: what decodes is encoded to bytes that decode to the same.

#include "common/control/messages.h"
#include "tests/fuzz/fuzz.h"
#include "tests/unit/base/control_samples.h"

namespace kvferry::fuzz {

std::vector<std::string> seeds() {
  std::vector<std::string> all;
  for (const ControlMessage& message : test::one_of_each()) {
    all.push_back(encode(message));
  }
  return all;
}

}  // namespace kvferry::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvferry;
  const auto message = decode_control(fuzz::text_of(data, size));
  if (!message) {
    KVF_CHECK(message.error().code == Code::kProtocol);
    fuzz::check_reason(message.error());
    return 0;
  }
  const std::string again = encode(*message);
  const auto second = decode_control(again);
  KVF_CHECK(second.has_value() && second->index() == message->index());
  KVF_CHECK(encode(*second) == again);
  return 0;
}
