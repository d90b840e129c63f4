#pragma once
// What every fuzz target has: the libFuzzer entry point, and the seeds that mutation starts from, made by the
// real encoders so that they never are of an older format. A target is one file; it aborts (KVF_CHECK) when a
// claim about the parser does not hold. The same file runs under libFuzzer (preset fuzz) and, in every test
// run, under replay.cc.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/check.h"
#include "common/base/error.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace kvferry::fuzz {

/// Defined by each target. More seeds, and inputs that once failed, lie in corpus/TARGET.
std::vector<std::string> seeds();

inline std::string_view text_of(const std::uint8_t* data, std::size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}
inline std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}
template <std::size_t kSize>
std::string string_of(const std::array<std::byte, kSize>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), kSize};
}

/// A refusal says why, in a text of bounded length.
inline void check_reason(const Error& error) {
  constexpr std::size_t kReasonMax = std::size_t{1} << 20;
  KVF_CHECK(!error.message.empty() && error.message.size() <= kReasonMax);
}

/// Takes an input apart from its front; at the end every number is 0 and every piece empty.
class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : rest_(text_of(data, size)) {}

  bool empty() const { return rest_.empty(); }
  std::uint8_t byte() { return empty() ? std::uint8_t{0} : static_cast<std::uint8_t>(take(1).front()); }
  std::string_view take(std::size_t count) {
    const std::string_view front = rest_.substr(0, count);
    rest_.remove_prefix(front.size());
    return front;
  }
  /// Two bytes of length, then so many bytes.
  std::string_view piece() {
    const std::size_t low = byte();
    return take(low | std::size_t{byte()} << 8);
  }
  std::string_view rest() { return take(rest_.size()); }

 private:
  std::string_view rest_;
};

/// What Input::piece() reads.
inline std::string piece(std::string_view text) {
  return std::string{static_cast<char>(text.size() & 0xFF), static_cast<char>(text.size() >> 8 & 0xFF)} +
         std::string(text);
}

}  // namespace kvferry::fuzz
