#pragma once
// Internal: how the HTTP server hands an admitted upgrade request to the channel code.

#include <boost/beast/http/message.hpp>
#include <boost/beast/http/string_body.hpp>
#include <functional>
#include <memory>

#include "common/base/result.h"
#include "common/control/channel.h"
#include "common/http/stream.h"

namespace kvferry {

using UpgradeRequest = boost::beast::http::request<boost::beast::http::string_body>;

/// Answers the upgrade on `stream` and calls `done` once from the io_context. `slot` lives as long as the
/// connection.
void accept_channel(Stream stream, const UpgradeRequest& request, const ChannelLimits& limits,
                    std::shared_ptr<void> slot, std::function<void(Result<std::shared_ptr<Channel>>)> done);

}  // namespace kvferry
