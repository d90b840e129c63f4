#pragma once
// http_fetch() between daemons that share a key: the request is signed, and an answer counts only when it is.

#include "common/auth/signed_request.h"
#include "common/http/client.h"

namespace kvferry {

/// Without a key plain http_fetch(). With one, also kUnauthorized: the answer is not signed with it. An error
/// answer (400 and up) that is not signed comes back as an Error with its text, since a daemon that does not
/// accept the request's signature cannot sign either.
std::shared_ptr<Pending> signed_fetch(boost::asio::io_context& io, std::shared_ptr<const SharedKey> key,
                                      HttpFetch fetch, std::function<void(Result<HttpResponse>)> done);

}  // namespace kvferry
