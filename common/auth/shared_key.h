#pragma once
// The secret that all daemons of a fleet share, read from a file once at start. It never leaves the process:
// what travels are message authentication codes (HMAC-SHA256) made with it, each for one named purpose, so
// that a code made for one thing is worth nothing for another.

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/result.h"

namespace kvferry {

using Mac = std::array<std::byte, 32>;

class SharedKey {
 public:
  /// kInvalid: the file cannot be read, holds less than 32 bytes or more than 4096 (a line end at its end
  /// does not count), or others than its owner and group may read it.
  static Result<std::shared_ptr<const SharedKey>> load(const std::string& path);
  /// For tests and derived keys.
  explicit SharedKey(std::span<const std::byte> secret);
  ~SharedKey();  // wipes it
  SharedKey(const SharedKey&) = delete;
  SharedKey& operator=(const SharedKey&) = delete;

  /// The code of `parts` for `purpose`. Lengths are part of what is coded: no two lists of parts collide.
  Mac mac(std::string_view purpose, std::initializer_list<std::string_view> parts) const;
  /// A key of its own for one purpose, e.g. one direction of one session.
  std::shared_ptr<const SharedKey> derive(std::string_view purpose,
                                          std::initializer_list<std::string_view> parts) const;

 private:
  std::vector<std::byte> secret_;
};

/// Takes the same time wherever they differ.
bool same_mac(std::string_view a, std::string_view b);

}  // namespace kvferry
