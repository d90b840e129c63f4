#include "common/base/error.h"

#include <fmt/format.h>

#include <system_error>

namespace kvferry {

std::string_view to_string(Code code) {
  switch (code) {
    case Code::kInvalid:
      return "invalid";
    case Code::kNotFound:
      return "not_found";
    case Code::kConflict:
      return "conflict";
    case Code::kMismatch:
      return "mismatch";
    case Code::kExhausted:
      return "exhausted";
    case Code::kUnauthorized:
      return "unauthorized";
    case Code::kDeadline:
      return "deadline";
    case Code::kPeerLost:
      return "peer_lost";
    case Code::kAborted:
      return "aborted";
    case Code::kEngineLost:
      return "engine_lost";
    case Code::kUnavailable:
      return "unavailable";
    case Code::kTransport:
      return "transport";
    case Code::kProtocol:
      return "protocol";
    case Code::kCorrupt:
      return "corrupt";
    case Code::kIo:
      return "io";
    case Code::kInternal:
      return "internal";
  }
  return "internal";
}

Code code_from_number(std::uint8_t number) {
  const auto code = static_cast<Code>(number);
  // to_string has no default, so it is the one list of known values; kInternal is its answer to all others.
  return to_string(code) == "internal" ? Code::kInternal : code;
}

int http_status(Code code) {
  switch (code) {
    case Code::kInvalid:
    case Code::kProtocol:
      return 400;
    case Code::kUnauthorized:
      return 401;
    case Code::kNotFound:
      return 404;
    case Code::kConflict:
      return 409;
    case Code::kMismatch:
    case Code::kCorrupt:
      return 422;
    case Code::kExhausted:
      return 429;
    case Code::kDeadline:
      return 504;
    case Code::kPeerLost:
    case Code::kAborted:
    case Code::kEngineLost:
    case Code::kUnavailable:
    case Code::kTransport:
      return 503;
    case Code::kIo:
    case Code::kInternal:
      return 500;
  }
  return 500;
}

Error errno_error(std::string_view what, int error_number) {
  return Error{Code::kIo, fmt::format("{}: {}", what, std::generic_category().message(error_number))};
}

}  // namespace kvferry
