#pragma once
// Internal: what a fetch and a channel being connected have in common. Dials, holds the time limit, and
// calls `done` exactly once (or never, when abandoned or when the io_context goes first).

#include <fmt/format.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "common/http/dial.h"
#include "common/http/pending.h"

namespace kvferry {

template <class T>
class Call : public PendingOperation, public std::enable_shared_from_this<Call<T>> {
 public:
  using Done = std::function<void(Result<T>)>;

  /// `what` names the call in messages, e.g. "GET 10.0.0.1:80/health".
  Call(boost::asio::io_context& io, HostPort to, std::string what, Done done)
      : io_(io), to_(std::move(to)), what_(std::move(what)), done_(std::move(done)), timer_(io) {}

  /// `sendable`: an error found before anything was sent; it ends the call.
  void start(std::chrono::milliseconds timeout, Result<void> sendable) {
    if (!sendable) {
      finish_later(std::move(sendable).error());
      return;
    }
    timer_.expires_after(timeout);
    timer_.async_wait([self = this->shared_from_this(), timeout](boost::system::error_code cancelled) {
      if (!cancelled) {
        self->finish(fail(Code::kDeadline, "{}: not complete within {} ms", self->what_, timeout.count()));
      }
    });
    dial_ = Dial::start(io_, to_, [self = this->shared_from_this()](Result<Stream> stream) {
      if (stream) {
        self->on_connected(*std::move(stream));
      } else {
        self->finish(fail(std::move(stream).error()));
      }
    });
  }

  void give_up(bool report) override {
    if (!report) {
      finish_silently();
    } else if (done_) {
      finish_later(Error{Code::kAborted, fmt::format("{}: cancelled", what_)});
    }
  }

 protected:
  virtual void on_connected(Stream stream) = 0;
  /// Closes what on_connected() opened.
  virtual void release() = 0;

  bool finished() const { return !done_; }
  const HostPort& to() const { return to_; }
  const std::string& what() const { return what_; }

  void finish(Result<T> result) {
    if (const Done done = finish_silently()) {
      done(std::move(result));
    }
  }

 private:
  void finish_later(Error error) {
    boost::asio::post(io_, [self = this->shared_from_this(), error = std::move(error)]() mutable {
      self->finish(fail(std::move(error)));
    });
  }

  Done finish_silently() {
    Done done = std::exchange(done_, nullptr);
    timer_.cancel();
    if (const auto dial = dial_.lock()) {
      dial->cancel();
    }
    release();
    return done;
  }

  boost::asio::io_context& io_;
  HostPort to_;
  std::string what_;
  Done done_;
  boost::asio::steady_timer timer_;
  std::weak_ptr<Dial> dial_;  // it holds this call through its callback
};

}  // namespace kvferry
