#include "common/http/message.h"

#include "common/auth/shared_key.h"

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

std::optional<HttpResponse> check_bearer(const std::string& token, const HttpRequest& request) {
  if (token.empty()) {
    return std::nullopt;
  }
  const auto header = request.headers.find("authorization");
  if (header != request.headers.end() && same_mac(header->second, "Bearer " + token)) {
    return std::nullopt;
  }
  HttpResponse refusal =
      http_error(401, "this listener wants 'Authorization: Bearer' with the text of metrics.token_file");
  refusal.headers.emplace_back("WWW-Authenticate", "Bearer");
  return refusal;
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

Result<void> check_sendable(const std::string& method, const std::string& target,
                            const HttpHeaders& headers) {
  if (!is_header_name(method)) {
    return fail(Code::kInvalid, "HTTP method '{}' cannot be sent", method);
  }
  if (!is_header_value(target) || !target.starts_with('/') ||
      target.find_first_of(" \t#") != std::string::npos) {
    return fail(Code::kInvalid, "HTTP target '{}' cannot be sent; percent-encode it, with a leading '/'",
                target);
  }
  for (const auto& [name, value] : headers) {
    if (!is_header_name(name) || !is_header_value(value)) {
      return fail(Code::kInvalid, "HTTP header '{}' cannot be sent", name);
    }
  }
  return {};
}

std::string host_header(const HostPort& to) {
  return HostPort{.host = to.host.substr(0, to.host.find('%')), .port = to.port}.to_string();
}

}  // namespace kvferry
