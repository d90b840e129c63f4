#include "common/base/hash.h"

#if defined(__x86_64__)
#include <xxh_x86dispatch.h>
#else
#include <xxhash.h>
#endif

#include <array>
#include <cstddef>

#include "common/base/check.h"

namespace kvferry {

std::uint64_t hash_bytes(std::span<const std::byte> bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

struct Hash64::State {
  XXH64_state_t* stream = XXH64_createState();
  State() { KVF_CHECK(stream != nullptr && XXH64_reset(stream, 0) == XXH_OK); }
  ~State() { XXH64_freeState(stream); }
  State(const State&) = delete;
  State& operator=(const State&) = delete;
};

Hash64::Hash64() : state_(std::make_unique<State>()) {}
Hash64::~Hash64() = default;

void Hash64::add(std::string_view bytes) {
  KVF_CHECK(XXH64_update(state_->stream, bytes.data(), bytes.size()) == XXH_OK);
}

void Hash64::add(std::span<const std::uint64_t> numbers) {
  std::array<char, 64 * sizeof(std::uint64_t)> bytes;
  std::size_t used = 0;
  for (const std::uint64_t number : numbers) {
    for (unsigned shift = 0; shift < 64; shift += 8) {
      bytes[used++] = static_cast<char>(number >> shift & 0xFF);
    }
    if (used == bytes.size()) {
      add(std::string_view(bytes.data(), used));
      used = 0;
    }
  }
  add(std::string_view(bytes.data(), used));
}

std::uint64_t Hash64::value() const {
  return XXH64_digest(state_->stream);
}

}  // namespace kvferry
