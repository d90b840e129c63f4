#pragma once
// Between daemons that share a key the token of a fabric offer travels sealed: who overhears the handshake
// cannot connect in the peer's place. An offer is the JSON text of a fabric, with "token" in hexadecimal
// digits; sealing replaces it by its exclusive or with a code over a fresh nonce, and adds that as "sealed".

#include <string>

#include "common/auth/shared_key.h"
#include "common/base/result.h"

namespace kvferry {

/// `offer` as it is when it has no token.
std::string seal_offer(const SharedKey& key, std::string_view kind, const std::string& offer);
/// The offer as the fabric made it. kUnauthorized when only one side has a key (`key` null: this one has
/// none).
Result<std::string> open_offer(const SharedKey* key, std::string_view kind, const std::string& offer);

}  // namespace kvferry
