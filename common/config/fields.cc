#include "common/config/fields.h"

#include <charconv>
#include <cmath>
#include <fstream>
#include <limits>

namespace kvferry {
namespace {

using nlohmann::json;

constexpr std::size_t kConfigBytesMax = 4u << 20;

std::string abbreviated(const json& value) {
  std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
  if (text.size() > 80) {
    text.resize(77);
    text += "...";
  }
  return text;
}

// Splits "250ms" into 250 and "ms". Fractions are allowed; what they come to is rounded to whole nanoseconds
// or bytes, as 4.1 * 1e9 is a little less than 4100000000.
bool split_number(std::string_view text, double& value, std::string_view& unit) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || !(value >= 0)) {
    return false;
  }
  unit = text.substr(static_cast<std::size_t>(end - text.data()));
  return true;
}

}  // namespace

Result<json> parse_config_text(std::string_view text, std::string_view source) {
  std::vector<std::set<std::string>> keys;
  std::string duplicate;
  const auto on_event = [&](int, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::object_start) {
      keys.emplace_back();
    } else if (event == json::parse_event_t::object_end) {
      keys.pop_back();
    } else if (event == json::parse_event_t::key && !keys.back().insert(parsed.get<std::string>()).second) {
      duplicate = parsed.get<std::string>();
    }
    return true;
  };
  // The non-throwing parse gives no position, and an operator needs one: this is one of the library wrappers
  // in which its exception is caught.
  try {
    json document = json::parse(text, on_event, true, true);
    if (!duplicate.empty()) {
      return fail(Code::kInvalid, "{}: key '{}' appears twice in one object; remove one", source, duplicate);
    }
    return document;
  } catch (const json::exception& error) {
    return fail(Code::kInvalid, "{}: {}", source, error.what());
  }
}

Result<std::string> read_config_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    return fail(errno_error("cannot read configuration " + path, errno));
  }
  // Bounded while it is read: the path may name a device that never ends. A folder opens and reads as
  // nothing.
  std::string text(kConfigBytesMax + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(file.gcount()));
  if (text.empty()) {
    return fail(Code::kInvalid, "{}: is empty or not a file", path);
  }
  if (text.size() > kConfigBytesMax) {
    return fail(Code::kInvalid, "{}: is larger than {} bytes, the most of a configuration", path,
                kConfigBytesMax);
  }
  return text;
}

Result<std::chrono::nanoseconds> parse_duration(std::string_view text) {
  double value = 0;
  std::string_view unit;
  double scale = 0;
  if (split_number(text, value, unit)) {
    scale = unit == "ns"                  ? 1.0
            : unit == "us"                ? 1e3
            : unit == "ms"                ? 1e6
            : unit == "s" || unit.empty() ? 1e9
            : unit == "m"                 ? 60e9
            : unit == "h"                 ? 3600e9
                                          : 0;
  }
  if (scale == 0 || value * scale > 9e18) {
    return fail(Code::kInvalid, "'{}' is not a duration such as 250ms, 5s, 2m or 1h", text);
  }
  return std::chrono::nanoseconds(std::llround(value * scale));
}

Result<std::uint64_t> parse_bytes(std::string_view text) {
  double value = 0;
  std::string_view unit;
  double scale = 0;
  if (split_number(text, value, unit)) {
    scale = unit == "B" || unit.empty() ? 1.0
            : unit == "KiB"             ? 1024.0
            : unit == "MiB"             ? 1048576.0
            : unit == "GiB"             ? 1073741824.0
            : unit == "TiB"             ? 1099511627776.0
            : unit == "KB"              ? 1e3
            : unit == "MB"              ? 1e6
            : unit == "GB"              ? 1e9
                                        : 0;
  }
  if (scale == 0 || value * scale > 9e18) {
    return fail(Code::kInvalid, "'{}' is not a size such as 64KiB, 2MiB or 1GiB", text);
  }
  return static_cast<std::uint64_t>(std::llround(value * scale));
}

std::string format_duration(std::chrono::nanoseconds value) {
  const auto ns = value.count();
  if (ns % 1'000'000'000 == 0) {
    return fmt::format("{}s", ns / 1'000'000'000);
  }
  return ns % 1'000'000 == 0 ? fmt::format("{}ms", ns / 1'000'000) : fmt::format("{}ns", ns);
}

FieldReader::FieldReader(const json* object, std::string path, ConfigErrors& errors)
    : object_(object), path_(std::move(path)), errors_(errors) {
  if (object_ != nullptr && !object_->is_object()) {
    errors_.add(path_.empty() ? "(top level)" : path_, "must be an object, is " + abbreviated(*object_));
    object_ = nullptr;
  }
}

std::string FieldReader::path(std::string_view key) const {
  return path_.empty() ? std::string(key) : path_ + "." + std::string(key);
}

const json* FieldReader::find(std::string_view key) {
  known_.emplace(key);
  if (object_ == nullptr) {
    return nullptr;
  }
  const auto found = object_->find(std::string(key));
  return found == object_->end() ? nullptr : &*found;
}

void FieldReader::wrong(std::string_view key, const json& value, std::string_view expected) {
  errors_.add(path(key), fmt::format("is {}, must be {}", abbreviated(value), expected));
}

bool FieldReader::has(std::string_view key) {
  return find(key) != nullptr;
}

std::string FieldReader::text(std::string_view key, std::string fallback) {
  const json* value = find(key);
  if (value == nullptr) {
    return fallback;
  }
  if (!value->is_string()) {
    wrong(key, *value, "a text");
    return fallback;
  }
  return value->get<std::string>();
}

std::string FieldReader::required_text(std::string_view key) {
  const json* value = find(key);
  if (value == nullptr || *value == "") {
    errors_.add(path(key), fmt::format("is {} and has no default", value == nullptr ? "missing" : "empty"));
    return {};
  }
  return text(key, {});
}

bool FieldReader::flag(std::string_view key, bool fallback) {
  const json* value = find(key);
  if (value == nullptr) {
    return fallback;
  }
  if (!value->is_boolean()) {
    wrong(key, *value, "true or false");
    return fallback;
  }
  return value->get<bool>();
}

std::uint64_t FieldReader::number(std::string_view key, std::uint64_t fallback, std::uint64_t min,
                                  std::uint64_t max) {
  const json* value = find(key);
  if (value == nullptr) {
    return fallback;
  }
  if (!value->is_number_unsigned() || value->get<std::uint64_t>() < min ||
      value->get<std::uint64_t>() > max) {
    wrong(key, *value, fmt::format("a whole number from {} to {}", min, max));
    return fallback;
  }
  return value->get<std::uint64_t>();
}

std::chrono::nanoseconds FieldReader::duration(std::string_view key, std::chrono::nanoseconds fallback,
                                               std::chrono::nanoseconds min, std::chrono::nanoseconds max) {
  const json* value = find(key);
  if (value == nullptr) {
    return fallback;
  }
  const std::string expected =
      fmt::format("a duration from {} to {}, e.g. \"5s\"", format_duration(min), format_duration(max));
  if (value->is_string() || value->is_number_unsigned()) {
    const auto parsed = parse_duration(value->is_string() ? value->get<std::string>() : value->dump());
    if (parsed && *parsed >= min && *parsed <= max) {
      return *parsed;
    }
  }
  wrong(key, *value, expected);
  return fallback;
}

std::uint64_t FieldReader::bytes(std::string_view key, std::uint64_t fallback, std::uint64_t min,
                                 std::uint64_t max) {
  const json* value = find(key);
  if (value == nullptr) {
    return fallback;
  }
  if (value->is_string() || value->is_number_unsigned()) {
    const auto parsed = parse_bytes(value->is_string() ? value->get<std::string>() : value->dump());
    if (parsed && *parsed >= min && *parsed <= max) {
      return *parsed;
    }
  }
  wrong(key, *value, fmt::format("a size from {} to {} bytes, e.g. \"2MiB\"", min, max));
  return fallback;
}

std::vector<std::string> FieldReader::texts(std::string_view key, std::vector<std::string> fallback) {
  const json* value = find(key);
  if (value == nullptr) {
    return fallback;
  }
  std::vector<std::string> out;
  bool good = value->is_array();
  for (const json& item : good ? *value : json::array()) {
    good = good && item.is_string();
    if (good) {
      out.push_back(item.get<std::string>());
    }
  }
  if (!good) {
    wrong(key, *value, "a list of texts");
    return fallback;
  }
  return out;
}

std::vector<std::uint32_t> FieldReader::numbers(std::string_view key, std::vector<std::uint32_t> fallback,
                                                std::uint32_t max) {
  const json* value = find(key);
  if (value == nullptr) {
    return fallback;
  }
  std::vector<std::uint32_t> out;
  bool good = value->is_array();
  for (const json& item : good ? *value : json::array()) {
    good = good && item.is_number_unsigned() && item.get<std::uint64_t>() <= max;
    if (good) {
      out.push_back(item.get<std::uint32_t>());
    }
  }
  if (!good) {
    wrong(key, *value, fmt::format("a list of whole numbers from 0 to {}", max));
    return fallback;
  }
  return out;
}

FieldReader FieldReader::object(std::string_view key) {
  return FieldReader(find(key), path(key), errors_);
}

void FieldReader::finish() {
  if (object_ == nullptr) {
    return;
  }
  for (const auto& [key, value] : object_->items()) {
    if (!known_.contains(key)) {
      std::string names;
      for (const std::string& name : known_) {
        names += (names.empty() ? "" : ", ") + name;
      }
      errors_.add(path(key), "is not a known key; known here: " + names);
    }
  }
}

}  // namespace kvferry
