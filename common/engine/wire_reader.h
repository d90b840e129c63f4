#pragma once
// Strict reading of one decoded MessagePack map: each key is asked for by name and type, and done() refuses
// what nobody asked for. Errors are named "<where><key>"; see wire.h for kProtocol and kInvalid.

#include <cstddef>
#include <cstdint>
#include <limits>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/result.h"

namespace kvferry::wire {

class MapReader {
 public:
  /// `map` outlives the reader and may be any value: not a map is an error of each read.
  MapReader(const nlohmann::json& map, std::string where);

  /// The key has been read elsewhere, or is optional.
  void skip(std::string_view key) { known_.push_back(key); }

  Result<std::uint64_t> number(std::string_view key,
                               std::uint64_t max = std::numeric_limits<std::uint64_t>::max());
  Result<std::uint32_t> u32(std::string_view key);
  /// -1 to INT32_MAX; -1 means none.
  Result<int> index_or_none(std::string_view key);
  Result<bool> boolean(std::string_view key);
  /// Clean text (see clean_text.h) of at most `bytes_max` bytes.
  Result<std::string> text(std::string_view key, std::size_t bytes_max);
  /// Any text, cleaned and cut: for sentences that nobody parses.
  Result<std::string> any_text(std::string_view key, std::size_t bytes_max);
  Result<std::vector<std::uint32_t>> pages(std::string_view key);
  Result<const nlohmann::json*> list(std::string_view key, std::size_t count_max);

  /// Every key of the map has been asked for.
  Result<void> done() const;

 private:
  Result<const nlohmann::json*> value(std::string_view key);
  tl::unexpected<Error> wrong_type(std::string_view key, const nlohmann::json& value,
                                   std::string_view wanted) const;

  const nlohmann::json& map_;
  std::string where_;
  std::vector<std::string_view> known_;
};

}  // namespace kvferry::wire
