#pragma once
// Reading JSON that a peer wrote. parse_outside_json() bounds size and nesting before a document is built;
// JsonObject then fetches typed, range-checked fields. A wrong field never stops the walk: it is noted with
// its path ("ranks[0].buffers[3].item_len") and a harmless value is returned, so that one answer names every
// wrong field. The caller asks JsonErrors once, at the end. Unknown keys are ignored.

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/result.h"

namespace kvferry {

/// The largest integer that every JSON implementation keeps exactly (IEEE double).
inline constexpr std::uint64_t kJsonIntegerMax = std::uint64_t{1} << 53;
inline constexpr std::size_t kJsonNestingMax = 32;

/// 16 lower-case hexadecimal digits: how 64-bit epochs and tokens travel, as JSON numbers end at 2^53.
std::string to_hex16(std::uint64_t value);
Result<std::uint64_t> parse_hex16(std::string_view text);

/// A document whose nesting is at most kJsonNestingMax. `what` names it in errors (kInvalid).
Result<nlohmann::json> parse_outside_json(std::string_view text, std::size_t bytes_max,
                                          std::string_view what);

/// Compact text; bytes that are not UTF-8 become U+FFFD instead of an exception.
std::string dump_json(const nlohmann::json& value);

/// A short form of any value for error messages: scalars as written (cut after 48 bytes), else the type.
std::string brief(const nlohmann::json& value);

/// Collects what is wrong with one document. Only the first kErrorsKept are kept; all are counted.
class JsonErrors {
 public:
  static constexpr std::size_t kErrorsKept = 8;

  void add(std::string_view path, std::string_view problem);
  bool empty() const { return count_ == 0; }
  /// kInvalid with "`what`: path: problem; path: problem; and 3 more".
  Error error(std::string_view what) const;

 private:
  std::vector<std::string> kept_;
  std::size_t count_ = 0;
};

/// One JSON object at `path`. Borrows the document and the errors: both outlive it.
class JsonObject {
 public:
  /// Anything but an object is noted as an error and then reads as an object without fields.
  JsonObject(const nlohmann::json& value, std::string path, JsonErrors& errors);

  /// The path of a field of this object.
  std::string path_of(std::string_view key) const;
  /// The field, or null where it is absent; noted as missing when `required`.
  const nlohmann::json* find(std::string_view key, bool required);

  std::uint64_t number(std::string_view key, std::uint64_t minimum, std::uint64_t maximum);
  std::uint64_t number_or(std::string_view key, std::uint64_t minimum, std::uint64_t maximum,
                          std::uint64_t fallback);
  std::uint32_t number32(std::string_view key, std::uint32_t minimum, std::uint32_t maximum);
  std::uint32_t number32_or(std::string_view key, std::uint32_t minimum, std::uint32_t maximum,
                            std::uint32_t fallback);
  /// A number, or the same number as decimal text (SGLang's ranks send either).
  std::uint64_t number_or_text(std::string_view key, std::uint64_t minimum, std::uint64_t maximum);
  std::string text(std::string_view key, std::size_t bytes_min, std::size_t bytes_max);
  std::string text_or(std::string_view key, std::size_t bytes_max, std::string_view fallback);
  bool boolean(std::string_view key);
  bool boolean_or(std::string_view key, bool fallback);
  std::uint64_t hex16(std::string_view key);
  /// The elements of an array of at most `count_max` values; empty (and noted) when it is anything else.
  const nlohmann::json& array(std::string_view key, std::size_t count_max);
  const nlohmann::json& array_or_empty(std::string_view key, std::size_t count_max);
  std::vector<std::uint32_t> numbers32_or_empty(std::string_view key, std::uint32_t maximum,
                                                std::size_t count_max);
  /// The object of a field; an empty one (and noted) when it is anything else.
  JsonObject object(std::string_view key);

  void wrong(std::string_view key, std::string_view problem) { errors_.add(path_of(key), problem); }
  JsonErrors& errors() { return errors_; }

 private:
  std::uint64_t number_of(const nlohmann::json& value, std::string_view key, std::uint64_t minimum,
                          std::uint64_t maximum);
  std::string text_of(const nlohmann::json& value, std::string_view key, std::size_t bytes_min,
                      std::size_t bytes_max);

  const nlohmann::json& value_;
  std::string path_;
  JsonErrors& errors_;
};

/// "path[3]"
std::string element_path(std::string_view path, std::size_t index);

/// `value` as an unsigned integer within the bounds, or a text that says what it is instead.
Result<std::uint64_t> json_number(const nlohmann::json& value, std::uint64_t minimum, std::uint64_t maximum);

}  // namespace kvferry
