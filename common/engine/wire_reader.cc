#include "common/engine/wire_reader.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "common/base/clean_text.h"

namespace kvferry::wire {

using nlohmann::json;

MapReader::MapReader(const json& map, std::string where) : map_(map), where_(std::move(where)) {}

Result<const json*> MapReader::value(std::string_view key) {
  known_.push_back(key);
  if (!map_.is_object()) {
    return fail(Code::kProtocol, "{}{} cannot be read: its parent is not a map but {}", where_, key,
                map_.type_name());
  }
  const auto found = map_.find(key);
  if (found == map_.end()) {
    return fail(Code::kProtocol, "{}{} is missing", where_, key);
  }
  return &*found;
}

tl::unexpected<Error> MapReader::wrong_type(std::string_view key, const json& value,
                                            std::string_view wanted) const {
  return fail(Code::kProtocol, "{}{} is {}, wanted {}", where_, key, value.type_name(), wanted);
}

Result<std::uint64_t> MapReader::number(std::string_view key, std::uint64_t max) {
  KVF_TRY(const json* found, value(key));
  if (!found->is_number_integer()) {
    return wrong_type(key, *found, "an integer");
  }
  if (!found->is_number_unsigned() && found->get<std::int64_t>() < 0) {
    return fail(Code::kInvalid, "{}{} is {}, at least 0 is legal", where_, key, found->get<std::int64_t>());
  }
  const auto number = found->get<std::uint64_t>();
  if (number > max) {
    return fail(Code::kInvalid, "{}{} is {}, at most {} is legal", where_, key, number, max);
  }
  return number;
}

Result<std::uint32_t> MapReader::u32(std::string_view key) {
  KVF_TRY(const std::uint64_t found, number(key, std::numeric_limits<std::uint32_t>::max()));
  return static_cast<std::uint32_t>(found);
}

Result<int> MapReader::index_or_none(std::string_view key) {
  constexpr auto kMax = std::numeric_limits<std::int32_t>::max();
  KVF_TRY(const json* found, value(key));
  if (!found->is_number_integer()) {
    return wrong_type(key, *found, "an integer");
  }
  const bool too_large = found->is_number_unsigned() && found->get<std::uint64_t>() > kMax;
  const auto index = found->get<std::int64_t>();
  if (too_large || index < -1 || index > kMax) {
    return fail(Code::kInvalid, "{}{} is {}, legal are -1 (none) to {}", where_, key, found->dump(), kMax);
  }
  return static_cast<int>(index);
}

Result<bool> MapReader::boolean(std::string_view key) {
  KVF_TRY(const json* found, value(key));
  if (!found->is_boolean()) {
    return wrong_type(key, *found, "a boolean");
  }
  return found->get<bool>();
}

Result<std::string> MapReader::text(std::string_view key, std::size_t bytes_max) {
  KVF_TRY(const json* found, value(key));
  const auto* text = found->get_ptr<const std::string*>();
  if (text == nullptr) {
    return wrong_type(key, *found, "text");
  }
  if (text->size() > bytes_max) {
    return fail(Code::kInvalid, "{}{} has {} bytes, at most {} are legal", where_, key, text->size(),
                bytes_max);
  }
  if (!is_clean_text(*text)) {
    return fail(Code::kInvalid, "{}{} is not UTF-8 without control characters: \"{}\"", where_, key,
                clean_text(*text));
  }
  return *text;
}

Result<std::string> MapReader::any_text(std::string_view key, std::size_t bytes_max) {
  KVF_TRY(const json* found, value(key));
  const auto* text = found->get_ptr<const std::string*>();
  if (text == nullptr) {
    return wrong_type(key, *found, "text");
  }
  return std::string(cut_text(clean_text(cut_text(*text, bytes_max)), bytes_max));
}

Result<std::vector<std::uint32_t>> MapReader::pages(std::string_view key) {
  KVF_TRY(const json* found, value(key));
  const auto* bytes = found->get_ptr<const json::binary_t*>();
  if (bytes == nullptr) {
    return wrong_type(key, *found, "a binary of little-endian uint32");
  }
  if (bytes->size() % sizeof(std::uint32_t) != 0) {
    return fail(Code::kProtocol, "{}{} has {} bytes, which is not a multiple of {}", where_, key,
                bytes->size(), sizeof(std::uint32_t));
  }
  std::vector<std::uint32_t> pages(bytes->size() / sizeof(std::uint32_t));
  if (!pages.empty()) {
    std::memcpy(pages.data(), bytes->data(), bytes->size());
  }
  return pages;
}

Result<const json*> MapReader::list(std::string_view key, std::size_t count_max) {
  KVF_TRY(const json* found, value(key));
  if (!found->is_array()) {
    return wrong_type(key, *found, "a list");
  }
  if (found->size() > count_max) {
    return fail(Code::kInvalid, "{}{} has {} entries, at most {} are legal", where_, key, found->size(),
                count_max);
  }
  return found;
}

Result<void> MapReader::done() const {
  for (const auto& entry : map_.items()) {
    if (std::find(known_.begin(), known_.end(), entry.key()) == known_.end()) {
      return fail(Code::kProtocol, "{}{} is not a known key", where_, clean_text(cut_text(entry.key(), 64)));
    }
  }
  return {};
}

}  // namespace kvferry::wire
