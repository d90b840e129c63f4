#pragma once
// Why something was refused or failed. The code says which kind (it is a metric label, an HTTP status class
// and travels on the wire as a number, so values are append-only); the message is for a person and names the
// field, both values and the fix.

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

namespace kvferry {

enum class Code : std::uint8_t {
  kInvalid = 1,       // malformed or illegal input; repeating it cannot work
  kNotFound = 2,      // names something that does not exist here
  kConflict = 3,      // duplicates something that is alive (HTTP 409)
  kMismatch = 4,      // two sides do not fit (compatibility rules)
  kExhausted = 5,     // a configured limit is reached; try again later
  kUnauthorized = 6,  // missing or wrong credentials
  kDeadline = 10,     // did not happen in time
  kPeerLost = 11,     // the other daemon or engine went away
  kAborted = 12,      // somebody asked for it to stop
  kEngineLost = 13,   // the engine that owned the room went away
  kUnavailable = 14,  // not ready, shutting down, not connected
  kTransport = 20,    // the fabric reported an error
  kProtocol = 21,     // the peer broke the protocol
  kCorrupt = 22,      // bytes or metadata are not what they must be
  kIo = 30,           // the operating system refused (errno in the message)
  kInternal = 31,     // our own fault, contained
};

/// Stable lower-case word for logs, metrics and JSON, e.g. "peer_lost".
std::string_view to_string(Code code);
/// Inverse for numbers from the wire; unknown numbers become kInternal.
Code code_from_number(std::uint8_t number);
/// The HTTP status that carries this code.
int http_status(Code code);

struct Error {
  Code code = Code::kInternal;
  std::string message;

  friend bool operator==(const Error&, const Error&) = default;
};

/// The text of the calling thread's errno value, for Error messages: "open /x: No such file or directory".
Error errno_error(std::string_view what, int error_number);

}  // namespace kvferry
