#pragma once
// The target of a request line: "/path?key=value", or the absolute form that proxies send. Pure.

#include <map>
#include <string>
#include <string_view>

#include "common/base/result.h"

namespace kvferry {

struct HttpTarget {
  std::string path;  // percent-decoded
  std::map<std::string, std::string>
      query;  // percent-decoded, '+' is a blank; the first of equal keys counts
};

/// Splits and decodes. Refuses (kInvalid): no leading '/', control characters, '#', a '%' that two hex digits
/// do not follow, an encoded NUL.
Result<HttpTarget> parse_target(std::string_view target);

/// Encodes everything but unreserved characters, for one query key or value or one path segment.
std::string percent_encode(std::string_view text);

}  // namespace kvferry
