#include "common/http/message.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>

namespace kvferry {

HttpResponse http_error(int status, const std::string& message) {
  const nlohmann::json body{{"error", message}};
  // Replacement instead of an exception: the message may quote bytes of a peer that are not UTF-8.
  return HttpResponse{.status = status,
                      .content_type = "application/json",
                      .body = body.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace),
                      .headers = {}};
}

bool is_header_value(const std::string& text) {
  return std::none_of(text.begin(), text.end(), [](char c) {
    const auto byte = static_cast<unsigned char>(c);
    return (byte < ' ' && c != '\t') || byte == 0x7f;
  });
}

bool is_header_name(const std::string& text) {
  constexpr std::string_view kMarks = "!#$%&'*+-.^_`|~";
  return !text.empty() && std::all_of(text.begin(), text.end(), [&](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
           kMarks.find(c) != std::string_view::npos;
  });
}

}  // namespace kvferry
