#include "tools/engine/protocol.h"

#include <unistd.h>

#include <cerrno>

namespace kvferry {

Result<nlohmann::json> parse_line(std::string_view line) {
  nlohmann::json object = nlohmann::json::parse(line, nullptr, false);
  if (object.is_discarded()) {
    return fail(Code::kInvalid, "not JSON: {}", line.substr(0, 80));
  }
  if (!object.is_object()) {
    return fail(Code::kInvalid, "a JSON {} where an object is needed: {}", object.type_name(),
                line.substr(0, 80));
  }
  return object;
}

Result<std::uint64_t> read_number(const nlohmann::json& object, const char* field, std::uint64_t min,
                                  std::uint64_t max) {
  const auto found = object.find(field);
  if (found == object.end()) {
    return fail(Code::kInvalid, "field {}: missing", field);
  }
  // Values above 2^63-1 parse as unsigned, all others that are not negative as either kind of integer.
  if (!found->is_number_integer() || (!found->is_number_unsigned() && found->get<std::int64_t>() < 0)) {
    return fail(Code::kInvalid, "field {}: {} is not an integer from {} to {}", field,
                found->dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).substr(0, 40), min,
                max);
  }
  const auto value = found->get<std::uint64_t>();
  if (value < min || value > max) {
    return fail(Code::kInvalid, "field {}: {} is not from {} to {}", field, value, min, max);
  }
  return value;
}

Result<std::string> read_text(const nlohmann::json& object, const char* field) {
  const auto found = object.find(field);
  if (found == object.end() || !found->is_string()) {
    return fail(Code::kInvalid, "field {}: missing, or not a text", field);
  }
  return found->get<std::string>();
}

bool read_flag(const nlohmann::json& object, const char* field) {
  const auto found = object.find(field);
  return found != object.end() && found->is_boolean() && found->get<bool>();
}

Result<std::vector<std::string>> LineBuffer::add(std::string_view bytes) {
  std::vector<std::string> lines;
  for (std::size_t end = bytes.find('\n'); end != std::string_view::npos; end = bytes.find('\n')) {
    rest_.append(bytes.substr(0, end));
    lines.push_back(std::move(rest_));
    rest_.clear();
    bytes.remove_prefix(end + 1);
  }
  rest_.append(bytes);
  if (rest_.size() > kProtocolLineMax) {
    return fail(Code::kInvalid, "a line of more than {} bytes", kProtocolLineMax);
  }
  return lines;
}

bool write_line(int fd, const nlohmann::json& object) {
  std::string line = object.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  line.push_back('\n');
  std::string_view rest = line;
  while (!rest.empty()) {
    const ssize_t written = ::write(fd, rest.data(), rest.size());
    if (written < 0 && errno == EINTR) {
      continue;
    }
    if (written <= 0) {
      return false;
    }
    rest.remove_prefix(static_cast<std::size_t>(written));
  }
  return true;
}

}  // namespace kvferry
