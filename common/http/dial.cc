#include "common/http/dial.h"

#include <boost/asio/connect.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <utility>

namespace kvferry {

namespace asio = boost::asio;
using boost::system::error_code;

std::shared_ptr<Dial> Dial::start(asio::io_context& io, const HostPort& to, DialDone done) {
  auto dial = std::make_shared<Dial>(io, to, std::move(done));
  dial->resolve();
  return dial;
}

Dial::Dial(asio::io_context& io, const HostPort& to, DialDone done)
    : to_(to), done_(std::move(done)), resolver_(io), stream_(io) {}

void Dial::cancel() {
  done_ = nullptr;
  resolver_.cancel();
  close_stream(stream_);
}

void Dial::resolve() {
  error_code error;
  const auto address = asio::ip::make_address(to_.host, error);
  if (!error) {
    const asio::ip::tcp::endpoint endpoint(address, to_.port);
    connect(Resolver::results_type::create(endpoint, to_.host, std::to_string(to_.port)));
    return;
  }
  resolver_.async_resolve(
      to_.host, std::to_string(to_.port), Resolver::numeric_service,
      [self = shared_from_this()](error_code failed, const Resolver::results_type& found) {
        if (!self->done_) {
          return;
        }
        if (failed) {
          self->finish(
              fail(Code::kUnavailable, "cannot resolve host '{}': {}", self->to_.host, failed.message()));
          return;
        }
        self->connect(found);
      });
}

void Dial::connect(const Resolver::results_type& endpoints) {
  asio::async_connect(
      stream_, endpoints, [self = shared_from_this()](error_code failed, const asio::ip::tcp::endpoint&) {
        if (!self->done_) {
          return;
        }
        if (failed) {
          self->finish(
              fail(Code::kUnavailable, "cannot connect to {}: {}", self->to_.to_string(), failed.message()));
          return;
        }
        set_no_delay(self->stream_);
        self->finish(std::move(self->stream_));
      });
}

void Dial::finish(Result<Stream> result) {
  const DialDone done = std::exchange(done_, nullptr);
  done(std::move(result));
}

}  // namespace kvferry
