#pragma once
// Typed reading of a JSON configuration. Missing keys take their default; present but wrong values, unknown
// keys and duplicate keys are errors. All errors of a file are collected and reported at once, each with its
// path.

#include <chrono>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/result.h"

namespace kvferry {

/// Parses JSON text with // and /* */ comments. Duplicate keys in one object are refused: the second would
/// win silently. The error names the line and column.
Result<nlohmann::json> parse_config_text(std::string_view text, std::string_view source);

/// The text of a configuration file: at most 4 MiB and not empty. Errors name the path.
Result<std::string> read_config_file(const std::string& path);

/// "250ms", "5s", "2m", "1h", or a number of seconds.
Result<std::chrono::nanoseconds> parse_duration(std::string_view text);
/// "64KiB", "2MiB", "1GiB", "500B" (also KB, MB, GB as powers of ten), or a number of bytes.
Result<std::uint64_t> parse_bytes(std::string_view text);
std::string format_duration(std::chrono::nanoseconds value);

struct ConfigErrors {
  std::vector<std::string> list;
  bool ok() const { return list.empty(); }
  void add(const std::string& path, const std::string& problem) { list.push_back(path + ": " + problem); }
};

/// One JSON object of a configuration. Every key that is asked for is known; finish() reports the others.
class FieldReader {
 public:
  /// `object` may be null (key absent): then every field takes its default. It must outlive the reader.
  FieldReader(const nlohmann::json* object, std::string path, ConfigErrors& errors);

  bool has(std::string_view key);
  std::string text(std::string_view key, std::string fallback);
  /// Neither absent nor empty; empty is returned with an error only.
  std::string required_text(std::string_view key);
  bool flag(std::string_view key, bool fallback);
  std::uint64_t number(std::string_view key, std::uint64_t fallback, std::uint64_t min, std::uint64_t max);
  std::chrono::nanoseconds duration(std::string_view key, std::chrono::nanoseconds fallback,
                                    std::chrono::nanoseconds min, std::chrono::nanoseconds max);
  std::uint64_t bytes(std::string_view key, std::uint64_t fallback, std::uint64_t min, std::uint64_t max);
  std::vector<std::string> texts(std::string_view key, std::vector<std::string> fallback);
  std::vector<std::uint32_t> numbers(std::string_view key, std::vector<std::uint32_t> fallback,
                                     std::uint32_t max);
  /// A nested object (absent: an empty one).
  FieldReader object(std::string_view key);
  /// Reports keys that nobody asked for.
  void finish();

  ConfigErrors& errors() { return errors_; }
  std::string path(std::string_view key) const;

 private:
  const nlohmann::json* find(std::string_view key);
  void wrong(std::string_view key, const nlohmann::json& value, std::string_view expected);

  const nlohmann::json* object_;
  std::string path_;
  ConfigErrors& errors_;
  std::set<std::string, std::less<>> known_;
};

}  // namespace kvferry
