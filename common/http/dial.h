#pragma once
// Internal to the HTTP and channel sources: resolve a name and connect. Numeric addresses (IPv6 with a zone
// too) need no resolver thread. No time limit of its own: the caller has one and calls cancel().

#include <functional>
#include <memory>

#include "common/base/host_port.h"
#include "common/base/result.h"
#include "common/http/stream.h"

namespace kvferry {

/// kUnavailable for anything that keeps the connection from coming up.
using DialDone = std::function<void(Result<Stream>)>;

/// A dial in progress; kept alive by its own pending steps only, so hold it weakly.
class Dial : public std::enable_shared_from_this<Dial> {
 public:
  /// `done` is called once from the io_context, never from inside start().
  static std::shared_ptr<Dial> start(boost::asio::io_context& io, const HostPort& to, DialDone done);

  Dial(boost::asio::io_context& io, const HostPort& to, DialDone done);
  /// `done` is destroyed and never called.
  void cancel();

 private:
  using Resolver = boost::asio::ip::tcp::resolver;

  void resolve();
  void connect(const Resolver::results_type& endpoints);
  void finish(Result<Stream> result);

  HostPort to_;
  DialDone done_;
  Resolver resolver_;
  Stream stream_;
};

}  // namespace kvferry
