#pragma once
// An HTTP request and its answer as plain values, shared by the server and the client.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/base/host_port.h"
#include "common/base/result.h"

namespace kvferry {

struct HttpRequest {
  std::string method;                        // upper case as received: GET, POST, ...
  std::string target;                        // exactly as received; what a signature is computed over
  std::string path;                          // percent-decoded, without the query; starts with '/', or is "*"
  std::map<std::string, std::string> query;  // decoded; of a repeated key the first one counts
  std::map<std::string, std::string> headers;  // lower-case names; repeated ones are joined with ", "
  std::string body;
  std::string remote;  // address:port of the other end
};

struct HttpResponse {
  int status = 200;
  std::string content_type = "application/json";
  std::string body;
  // Beyond content type and length. What the client returns has lower-case names; what the server is given
  // is dropped where a name or value could not be sent safely (line ends, blanks in a name).
  std::vector<std::pair<std::string, std::string>> headers;
};

/// {"error": "<message>"} with that status.
HttpResponse http_error(int status, const std::string& message);

/// Where `token` is not empty: the refusal (401) of a request without `Authorization: Bearer TOKEN`.
std::optional<HttpResponse> check_bearer(const std::string& token, const HttpRequest& request);

/// True when `text` may stand in a header value or a request line: no control characters.
bool is_header_value(const std::string& text);
/// True when `text` is a header name or method (RFC 9110 token).
bool is_header_name(const std::string& text);

using HttpHeaders = std::vector<std::pair<std::string, std::string>>;

/// kInvalid when one of them could not be sent as it is (line ends, blanks, a target that is not a path).
Result<void> check_sendable(const std::string& method, const std::string& target, const HttpHeaders& headers);

/// The value of a Host header. A zone is meaningful on this host only and does not travel.
std::string host_header(const HostPort& to);

}  // namespace kvferry
