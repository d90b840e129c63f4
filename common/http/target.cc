#include "common/http/target.h"

#include <utility>

namespace kvferry {
namespace {

int hex_digit(char c) {
  if (c >= '0' && c <= '9') {
    return c - '0';
  }
  if (c >= 'a' && c <= 'f') {
    return c - 'a' + 10;
  }
  if (c >= 'A' && c <= 'F') {
    return c - 'A' + 10;
  }
  return -1;
}

Result<std::string> decode(std::string_view text, bool plus_is_blank) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      out.push_back(plus_is_blank && text[i] == '+' ? ' ' : text[i]);
      continue;
    }
    const int high = i + 2 < text.size() ? hex_digit(text[i + 1]) : -1;
    const int low = i + 2 < text.size() ? hex_digit(text[i + 2]) : -1;
    if (high < 0 || low < 0) {
      return fail(Code::kInvalid, "'%' at position {} of '{}' is not followed by two hex digits", i, text);
    }
    if (high == 0 && low == 0) {
      return fail(Code::kInvalid, "encoded NUL at position {} of '{}'", i, text);
    }
    out.push_back(static_cast<char>(high * 16 + low));
    i += 2;
  }
  return out;
}

// "http://host/path" is what a proxy sends; what counts here is the path.
std::string_view without_authority(std::string_view target) {
  for (const std::string_view scheme : {"http://", "https://"}) {
    if (target.starts_with(scheme)) {
      const auto end = target.find_first_of("/?", scheme.size());
      return end == std::string_view::npos ? std::string_view("/") : target.substr(end);
    }
  }
  return target;
}

}  // namespace

Result<HttpTarget> parse_target(std::string_view target) {
  for (const char c : target) {
    if (static_cast<unsigned char>(c) <= ' ' || c == 0x7f || c == '#') {
      return fail(Code::kInvalid, "request target has an illegal character (0x{:02x})",
                  static_cast<unsigned char>(c));
    }
  }
  if (target == "*") {
    return HttpTarget{.path = "*", .query = {}};
  }
  const std::string_view local = without_authority(target);
  if (!local.starts_with('/') && !(local.starts_with('?') && local.size() < target.size())) {
    return fail(Code::kInvalid, "request target '{}' does not start with '/'", target);
  }
  const auto mark = local.find('?');
  HttpTarget out;
  KVF_TRY(out.path, decode(local.substr(0, mark), false));
  if (out.path.empty()) {
    out.path = "/";
  }
  std::string_view rest = mark == std::string_view::npos ? std::string_view() : local.substr(mark + 1);
  while (!rest.empty()) {
    const auto end = rest.find('&');
    const std::string_view pair = rest.substr(0, end);
    rest = end == std::string_view::npos ? std::string_view() : rest.substr(end + 1);
    if (pair.empty()) {
      continue;
    }
    const auto equals = pair.find('=');
    KVF_TRY(std::string key, decode(pair.substr(0, equals), true));
    KVF_TRY(std::string value,
            decode(equals == std::string_view::npos ? std::string_view() : pair.substr(equals + 1), true));
    out.query.emplace(std::move(key), std::move(value));
  }
  return out;
}

std::string percent_encode(std::string_view text) {
  constexpr std::string_view kHex = "0123456789ABCDEF";
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if ((c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' || c == '.' ||
        c == '_' || c == '~') {
      out.push_back(c);
    } else {
      out.push_back('%');
      out.push_back(kHex[byte >> 4]);
      out.push_back(kHex[byte & 15]);
    }
  }
  return out;
}

}  // namespace kvferry
