#pragma once
// One HTTP/1.1 request to another daemon, on a connection of its own. Redirects are not followed: every
// status is a result. Thread: the io_context's. The io_context may be destroyed while a fetch is under way;
// its callback is then destroyed without a call (a name being resolved is waited for).

#include <boost/asio/io_context.hpp>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/base/host_port.h"
#include "common/base/result.h"
#include "common/http/message.h"
#include "common/http/pending.h"

namespace kvferry {

struct HttpFetch {
  HostPort to;  // a name, an IPv4 or an IPv6 literal (with zone where needed)
  std::string method = "GET";
  std::string target = "/";  // path and query, already percent-encoded
  std::string body;
  std::string content_type = "application/json";  // sent when there is a body
  std::vector<std::pair<std::string, std::string>> headers;
  std::chrono::milliseconds timeout{10000};  // for everything: resolving, connecting, the whole answer
  std::uint64_t body_bytes_max = 16 << 20;   // of the answer
};

/// `done` is called once, from the io_context and never from inside this call, with the answer or
///   kDeadline     not complete within the timeout
///   kUnavailable  name unknown, connection refused, or lost before the answer was complete
///   kProtocol     the answer is not HTTP, or larger than body_bytes_max (64 KiB for its header)
///   kInvalid      method, target or a header contains something that cannot be sent
///   kAborted      cancelled through the returned handle
std::shared_ptr<Pending> http_fetch(boost::asio::io_context& io, HttpFetch fetch,
                                    std::function<void(Result<HttpResponse>)> done);

}  // namespace kvferry
