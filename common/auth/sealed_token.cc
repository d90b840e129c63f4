#include "common/auth/sealed_token.h"

#include <nlohmann/json.hpp>

#include "common/base/hex.h"

namespace kvferry {
namespace {

using nlohmann::json;

constexpr const char* kToken = "token";
constexpr const char* kSealed = "sealed";

bool is_hex(const json& value) {
  return value.is_string() && value.get_ref<const std::string&>().size() % 2 == 0 &&
         value.get_ref<const std::string&>().size() <= 2 * sizeof(Mac) &&
         value.get_ref<const std::string&>().find_first_not_of("0123456789abcdef") == std::string::npos;
}

std::string mask(const SharedKey& key, std::string_view kind, std::string_view nonce,
                 const std::string& token) {
  const std::string stream = to_hex(key.mac("fabric token", {kind, nonce}));
  const auto digit = [](char c) { return c <= '9' ? c - '0' : c - 'a' + 10; };
  std::string out;
  for (std::size_t i = 0; i < token.size(); ++i) {
    out.push_back("0123456789abcdef"[digit(token[i]) ^ digit(stream[i])]);
  }
  return out;
}

}  // namespace

std::string seal_offer(const SharedKey& key, std::string_view kind, const std::string& offer) {
  json document = json::parse(offer, nullptr, false);
  if (!document.is_object() || !document.contains(kToken) || !is_hex(document[kToken])) {
    return offer;
  }
  const std::string nonce = random_hex();
  document[kToken] = mask(key, kind, nonce, document[kToken].get<std::string>());
  document[kSealed] = nonce;
  return document.dump();
}

Result<std::string> open_offer(const SharedKey* key, std::string_view kind, const std::string& offer) {
  json document = json::parse(offer, nullptr, false);
  const bool sealed = document.is_object() && document.contains(kSealed) && document[kSealed].is_string();
  if (key == nullptr && sealed) {
    return fail(Code::kUnauthorized,
                "the {} offer is sealed with a key, and this daemon has none; set auth.key_file", kind);
  }
  if (key == nullptr || !document.is_object() || !document.contains(kToken)) {
    return offer;
  }
  if (!sealed || !is_hex(document[kToken])) {
    return fail(Code::kUnauthorized, "the {} offer is not sealed; set auth.key_file on the decode side too",
                kind);
  }
  document[kToken] =
      mask(*key, kind, document[kSealed].get<std::string>(), document[kToken].get<std::string>());
  document.erase(kSealed);
  return document.dump();
}

}  // namespace kvferry
