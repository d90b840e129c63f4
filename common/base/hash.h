#pragma once
// XXH64 over a stream of numbers and bytes: the same on every machine, because numbers are taken as eight
// little-endian bytes. A fingerprint for comparing, not a protection against anybody.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

namespace kvferry {

/// XXH3 of one stretch of bytes, with the instructions that this CPU has: near memory speed.
std::uint64_t hash_bytes(std::span<const std::byte> bytes);

class Hash64 {
 public:
  Hash64();
  ~Hash64();
  Hash64(const Hash64&) = delete;
  Hash64& operator=(const Hash64&) = delete;

  void add(std::string_view bytes);
  void add(std::span<const std::uint64_t> numbers);
  /// Of everything added so far.
  std::uint64_t value() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvferry
