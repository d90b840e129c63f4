#include "common/base/host_port.h"

#include <arpa/inet.h>

#include <charconv>

namespace kvferry {
namespace {

Result<std::uint16_t> parse_port(std::string_view text, std::string_view whole, bool allow_zero) {
  unsigned value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || value > 65535 ||
      (value == 0 && !allow_zero)) {
    return fail(Code::kInvalid, "port '{}' in '{}' is not a number from {} to 65535", text, whole,
                allow_zero ? 0 : 1);
  }
  return static_cast<std::uint16_t>(value);
}

// `host` without its zone; a name or an IPv4 literal has none and stays as it is.
std::string_view without_zone(std::string_view host) {
  return host.substr(0, host.find('%'));
}

bool is_literal(int family, std::string_view text) {
  in6_addr address{};  // larger than in_addr
  return text.find('\0') == std::string_view::npos &&
         ::inet_pton(family, std::string(text).c_str(), &address) == 1;
}

bool is_ipv6(std::string_view host) {
  return !host.ends_with('%') && is_literal(AF_INET6, without_zone(host));
}

}  // namespace

std::string HostPort::to_string() const {
  return host.find(':') == std::string::npos ? fmt::format("{}:{}", host, port)
                                             : fmt::format("[{}]:{}", host, port);
}

Result<HostPort> parse_host_port(std::string_view text, std::optional<std::uint16_t> default_port,
                                 bool allow_port_zero) {
  std::string_view host = text;
  std::string_view port;
  bool has_port = false;
  if (!text.empty() && text.front() == '[') {
    const auto close = text.find(']');
    if (close == std::string_view::npos) {
      return fail(Code::kInvalid, "address '{}' has '[' without ']'", text);
    }
    host = text.substr(1, close - 1);
    const std::string_view rest = text.substr(close + 1);
    if (!rest.empty()) {
      if (rest.front() != ':') {
        return fail(Code::kInvalid, "address '{}' has '{}' after ']'; write [host]:port", text, rest);
      }
      port = rest.substr(1);
      has_port = true;
    }
    if (host.find(':') == std::string_view::npos) {
      return fail(Code::kInvalid, "address '{}': brackets are for IPv6 literals only", text);
    }
  } else if (const auto colon = text.find(':'); colon != std::string_view::npos && text.rfind(':') == colon) {
    host = text.substr(0, colon);
    port = text.substr(colon + 1);
    has_port = true;
  }
  if (host.empty()) {
    return fail(Code::kInvalid, "address '{}' has no host", text);
  }
  for (const char c : host) {
    if (static_cast<unsigned char>(c) <= ' ' || c == '/' || c == '[' || c == ']' || c == '@') {
      return fail(Code::kInvalid, "address '{}' has an illegal character in its host", text);
    }
  }
  if (host.find(':') != std::string_view::npos && !is_ipv6(host)) {
    return fail(Code::kInvalid, "address '{}': '{}' is not an IPv6 literal", text, host);
  }
  HostPort out{.host = std::string(host), .port = 0};
  if (has_port) {
    KVF_TRY(out.port, parse_port(port, text, allow_port_zero));
  } else if (default_port) {
    out.port = *default_port;
  } else {
    return fail(Code::kInvalid, "address '{}' has no port; write host:port or [ipv6]:port", text);
  }
  return out;
}

bool is_loopback(std::string_view host) {
  return host == "localhost" || (is_literal(AF_INET, host) && host.starts_with("127.")) ||
         (is_ipv6(host) && without_zone(host) == "::1");
}

}  // namespace kvferry
