#pragma once
// Internal to channel.cc: the stream under a WebSocket, with our own way to end it. Beast's waits, without a
// limit, for the peer to close first; a peer that stays would keep the end of its own channel from being
// reported. Both sides have exchanged close frames (or one has broken the protocol) when this runs, so
// closing at once loses nothing.

#include <boost/asio/post.hpp>
#include <boost/beast/core/bind_handler.hpp>
#include <boost/beast/core/role.hpp>
#include <utility>

#include "common/http/stream.h"

namespace kvferry {

class ChannelStream : public Stream {
 public:
  explicit ChannelStream(Stream stream) : Stream(std::move(stream)) {}
};

template <class Handler>
void async_teardown(boost::beast::role_type, ChannelStream& stream, Handler&& handler) {
  close_stream(stream);
  boost::asio::post(stream.get_executor(), boost::beast::bind_front_handler(std::forward<Handler>(handler),
                                                                            boost::system::error_code{}));
}

}  // namespace kvferry
