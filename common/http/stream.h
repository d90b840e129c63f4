#pragma once
// Internal to the HTTP and channel sources: the one byte stream type that sessions, fetches and channels use.
// A TLS layer changes this alias and the two places that make a stream (the server's accept, dial.cc),
// nothing else: everything above uses Asio's stream operations and the functions below.

#include <boost/asio/ip/tcp.hpp>
#include <string>

#include "common/base/host_port.h"

namespace kvferry {

using Stream = boost::asio::ip::tcp::socket;

inline std::string endpoint_text(const boost::asio::ip::tcp::endpoint& endpoint) {
  return HostPort{.host = endpoint.address().to_string(), .port = endpoint.port()}.to_string();
}

inline std::string remote_of(const Stream& stream) {
  boost::system::error_code error;
  const auto endpoint = stream.remote_endpoint(error);
  return error ? std::string("unknown") : endpoint_text(endpoint);
}

/// Small messages must leave at once; a refusal by the system only costs latency, so it is ignored.
inline void set_no_delay(Stream& stream) {
  boost::system::error_code ignored;
  stream.set_option(boost::asio::ip::tcp::no_delay(true), ignored);
}

inline void close_stream(Stream& stream) {
  boost::system::error_code ignored;
  stream.close(ignored);
}

}  // namespace kvferry
