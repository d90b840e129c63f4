// A control channel's messages, one piece each: only the next number is taken, a refused message changes
// nothing, and what is taken resets the silence.

#include "common/control/link.h"
#include "tests/fuzz/fuzz.h"
#include "tests/unit/base/control_samples.h"

namespace kvferry::fuzz {

std::vector<std::string> seeds() {
  std::string whole;
  std::string repeated;
  ControlLink sender(0, std::chrono::seconds(3));
  for (const ControlMessage& message : test::one_of_each()) {
    const std::string bytes = sender.wrap(message);
    whole += piece(bytes);
    repeated += piece(bytes) + piece(bytes);
  }
  ControlLink other(0, std::chrono::seconds(3));
  return {whole, repeated, piece(other.heartbeat()) + piece(other.heartbeat()) + piece(other.heartbeat())};
}

namespace {

std::uint64_t number_of(std::string_view bytes) {
  std::uint64_t number = 0;
  for (std::size_t i = 0; i < 8 && i < bytes.size(); ++i) {
    number |= std::uint64_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
  }
  return number;
}

}  // namespace
}  // namespace kvferry::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvferry;
  constexpr std::int64_t kStep = 10;
  ControlLink link(0, std::chrono::nanoseconds(kStep - 1));
  std::uint64_t taken = 0;
  std::int64_t now = 0;
  for (fuzz::Input input(data, size); !input.empty();) {
    const std::string_view bytes = input.piece();
    now += kStep;
    KVF_CHECK(link.silence(now).has_value());
    const auto message = link.unwrap(now, bytes);
    KVF_CHECK(link.silence(now).has_value() != message.has_value());
    if (message) {
      KVF_CHECK(fuzz::number_of(bytes) == ++taken);
    } else {
      KVF_CHECK(message.error().code == Code::kProtocol);
      fuzz::check_reason(message.error());
      // A second attempt is refused for the same reason: nothing has changed.
      const auto second = link.unwrap(now, bytes);
      KVF_CHECK(!second && second.error() == message.error());
    }
  }
  return 0;
}
