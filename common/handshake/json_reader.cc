#include "common/handshake/json_reader.h"

#include <charconv>

#include "common/base/narrow.h"

namespace kvferry {
namespace {

using nlohmann::json;

const json& empty_object() {
  static const json value = json::object();
  return value;
}

const json& empty_array() {
  static const json value = json::array();
  return value;
}

/// The deepest nesting of brackets outside strings. Counted on the text, because walking, copying and
/// printing a document recurse once per level.
std::size_t nesting(std::string_view text) {
  std::size_t depth = 0;
  std::size_t deepest = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') {
        ++i;
      } else if (c == '"') {
        in_string = false;
      }
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      deepest = std::max(deepest, ++depth);
    } else if ((c == ']' || c == '}') && depth > 0) {
      --depth;
    }
  }
  return deepest;
}

std::string range_text(std::uint64_t minimum, std::uint64_t maximum) {
  return minimum == maximum ? fmt::format("{}", minimum) : fmt::format("{} to {}", minimum, maximum);
}

}  // namespace

std::string to_hex16(std::uint64_t value) {
  return fmt::format("{:016x}", value);
}

Result<std::uint64_t> parse_hex16(std::string_view text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, 16);
  if (text.size() != 16 || error != std::errc{} || end != text.data() + text.size()) {
    return fail(Code::kInvalid, "expected 16 hexadecimal digits, got '{}'", text.substr(0, 48));
  }
  return value;
}

Result<json> parse_outside_json(std::string_view text, std::size_t bytes_max, std::string_view what) {
  if (text.size() > bytes_max) {
    return fail(Code::kInvalid, "{} has {} bytes, more than the {} allowed", what, text.size(), bytes_max);
  }
  if (const std::size_t depth = nesting(text); depth > kJsonNestingMax) {
    return fail(Code::kInvalid, "{} is nested {} levels deep, more than the {} allowed", what, depth,
                kJsonNestingMax);
  }
  json value = json::parse(text, nullptr, false);
  if (value.is_discarded()) {
    return fail(Code::kInvalid, "{} is not valid JSON", what);
  }
  return value;
}

std::string dump_json(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

std::string brief(const json& value) {
  constexpr std::size_t kShown = 48;
  if (value.is_array()) {
    return fmt::format("an array of {}", value.size());
  }
  if (value.is_object()) {
    return "an object";
  }
  std::string text = dump_json(value);
  if (text.size() > kShown) {
    text.resize(kShown);
    // Not to cut a multi-byte character in half: the message itself travels as JSON.
    while (!text.empty() && (static_cast<unsigned char>(text.back()) & 0xC0U) == 0x80U) {
      text.pop_back();
    }
    if (!text.empty() && static_cast<unsigned char>(text.back()) >= 0xC0U) {
      text.pop_back();
    }
    text += "...";
  }
  return text;
}

std::string element_path(std::string_view path, std::size_t index) {
  return fmt::format("{}[{}]", path, index);
}

Result<std::uint64_t> json_number(const json& value, std::uint64_t minimum, std::uint64_t maximum) {
  if (value.is_number_unsigned()) {
    const auto number = value.get<std::uint64_t>();
    if (number >= minimum && number <= maximum) {
      return number;
    }
  }
  return fail(Code::kInvalid, "expected an integer from {}, got {}", range_text(minimum, maximum),
              brief(value));
}

void JsonErrors::add(std::string_view path, std::string_view problem) {
  ++count_;
  if (kept_.size() < kErrorsKept) {
    kept_.push_back(path.empty() ? std::string(problem) : fmt::format("{}: {}", path, problem));
  }
}

Error JsonErrors::error(std::string_view what) const {
  std::string message = fmt::format("{}: {}", what, fmt::join(kept_, "; "));
  if (count_ > kept_.size()) {
    message += fmt::format("; and {} more", count_ - kept_.size());
  }
  return Error{Code::kInvalid, std::move(message)};
}

JsonObject::JsonObject(const json& value, std::string path, JsonErrors& errors)
    : value_(value.is_object() ? value : empty_object()), path_(std::move(path)), errors_(errors) {
  if (!value.is_object()) {
    errors_.add(path_, fmt::format("expected an object, got {}", brief(value)));
  }
}

std::string JsonObject::path_of(std::string_view key) const {
  return path_.empty() ? std::string(key) : fmt::format("{}.{}", path_, key);
}

const json* JsonObject::find(std::string_view key, bool required) {
  const auto found = value_.find(key);
  if (found != value_.end()) {
    return &*found;
  }
  if (required) {
    wrong(key, "missing");
  }
  return nullptr;
}

std::uint64_t JsonObject::number_of(const json& value, std::string_view key, std::uint64_t minimum,
                                    std::uint64_t maximum) {
  const auto number = json_number(value, minimum, maximum);
  if (!number) {
    wrong(key, number.error().message);
    return minimum;
  }
  return *number;
}

std::uint64_t JsonObject::number(std::string_view key, std::uint64_t minimum, std::uint64_t maximum) {
  const json* value = find(key, true);
  return value == nullptr ? minimum : number_of(*value, key, minimum, maximum);
}

std::uint64_t JsonObject::number_or(std::string_view key, std::uint64_t minimum, std::uint64_t maximum,
                                    std::uint64_t fallback) {
  const json* value = find(key, false);
  return value == nullptr ? fallback : number_of(*value, key, minimum, maximum);
}

std::uint32_t JsonObject::number32(std::string_view key, std::uint32_t minimum, std::uint32_t maximum) {
  return narrow<std::uint32_t>(number(key, minimum, maximum));
}

std::uint32_t JsonObject::number32_or(std::string_view key, std::uint32_t minimum, std::uint32_t maximum,
                                      std::uint32_t fallback) {
  return narrow<std::uint32_t>(number_or(key, minimum, maximum, fallback));
}

std::uint64_t JsonObject::number_or_text(std::string_view key, std::uint64_t minimum, std::uint64_t maximum) {
  const json* value = find(key, true);
  if (value == nullptr) {
    return minimum;
  }
  if (!value->is_string()) {
    return number_of(*value, key, minimum, maximum);
  }
  const auto& digits = value->get_ref<const std::string&>();
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  if (error != std::errc{} || end != digits.data() + digits.size()) {
    wrong(key,
          fmt::format("expected an integer from {}, got {}", range_text(minimum, maximum), brief(*value)));
    return minimum;
  }
  return number_of(json(number), key, minimum, maximum);
}

std::string JsonObject::text_of(const json& value, std::string_view key, std::size_t bytes_min,
                                std::size_t bytes_max) {
  if (!value.is_string()) {
    wrong(key, fmt::format("expected a text, got {}", brief(value)));
    return {};
  }
  const auto& text = value.get_ref<const std::string&>();
  if (text.size() < bytes_min || text.size() > bytes_max) {
    wrong(key,
          fmt::format("expected a text of {} bytes, got {}", range_text(bytes_min, bytes_max), text.size()));
    return {};
  }
  return text;
}

std::string JsonObject::text(std::string_view key, std::size_t bytes_min, std::size_t bytes_max) {
  const json* value = find(key, true);
  return value == nullptr ? std::string{} : text_of(*value, key, bytes_min, bytes_max);
}

std::string JsonObject::text_or(std::string_view key, std::size_t bytes_max, std::string_view fallback) {
  const json* value = find(key, false);
  return value == nullptr ? std::string(fallback) : text_of(*value, key, 0, bytes_max);
}

bool JsonObject::boolean(std::string_view key) {
  return find(key, true) != nullptr && boolean_or(key, false);
}

bool JsonObject::boolean_or(std::string_view key, bool fallback) {
  const json* value = find(key, false);
  if (value == nullptr) {
    return fallback;
  }
  if (!value->is_boolean()) {
    wrong(key, fmt::format("expected true or false, got {}", brief(*value)));
    return fallback;
  }
  return value->get<bool>();
}

std::uint64_t JsonObject::hex16(std::string_view key) {
  const json* value = find(key, true);
  if (value == nullptr) {
    return 0;
  }
  if (!value->is_string()) {
    wrong(key, fmt::format("expected 16 hexadecimal digits, got {}", brief(*value)));
    return 0;
  }
  const auto number = parse_hex16(value->get_ref<const std::string&>());
  if (!number) {
    wrong(key, number.error().message);
    return 0;
  }
  return *number;
}

const json& JsonObject::array(std::string_view key, std::size_t count_max) {
  return find(key, true) == nullptr ? empty_array() : array_or_empty(key, count_max);
}

const json& JsonObject::array_or_empty(std::string_view key, std::size_t count_max) {
  const json* value = find(key, false);
  if (value == nullptr) {
    return empty_array();
  }
  if (!value->is_array()) {
    wrong(key, fmt::format("expected an array, got {}", brief(*value)));
    return empty_array();
  }
  if (value->size() > count_max) {
    wrong(key, fmt::format("has {} elements, more than the {} allowed", value->size(), count_max));
    return empty_array();
  }
  return *value;
}

std::vector<std::uint32_t> JsonObject::numbers32_or_empty(std::string_view key, std::uint32_t maximum,
                                                          std::size_t count_max) {
  const json& values = array_or_empty(key, count_max);
  std::vector<std::uint32_t> out;
  out.reserve(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto number = json_number(values[i], 0, maximum);
    if (!number) {
      errors_.add(element_path(path_of(key), i), number.error().message);
    }
    out.push_back(number ? narrow<std::uint32_t>(*number) : 0);
  }
  return out;
}

JsonObject JsonObject::object(std::string_view key) {
  const json* value = find(key, true);
  return JsonObject(value == nullptr ? empty_object() : *value, path_of(key), errors_);
}

}  // namespace kvferry
