#include "transport/ucx/wire.h"

#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>

#include "common/base/hex.h"
#include "common/base/random.h"

namespace kvferry::ucx {
namespace {

using nlohmann::json;

constexpr std::uint32_t kHelloMagic = 0x3155'564B;  // "KVU1"
constexpr int kOfferVersion = 1;
constexpr std::size_t kAddressMax = 64u << 10;
constexpr std::size_t kKeyMax = 4096;
constexpr std::size_t kBuffersMax = 65536;

int hex_digit(char c) {
  if (c >= '0' && c <= '9') {
    return c - '0';
  }
  return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

std::optional<std::vector<std::byte>> from_hex(std::string_view text, std::size_t bytes_max) {
  if (text.size() % 2 != 0 || text.size() / 2 > bytes_max) {
    return std::nullopt;
  }
  std::vector<std::byte> out;
  out.reserve(text.size() / 2);
  for (std::size_t i = 0; i < text.size(); i += 2) {
    const int high = hex_digit(text[i]);
    const int low = hex_digit(text[i + 1]);
    if (high < 0 || low < 0) {
      return std::nullopt;
    }
    out.push_back(static_cast<std::byte>(high * 16 + low));
  }
  return out;
}

// FNV-1a: against damage, not against forgery. Forgery is what the handshake's authentication is for.
std::uint64_t checksum(std::span<const std::byte> bytes) {
  std::uint64_t hash = 0xcbf2'9ce4'8422'2325ull;
  for (const std::byte b : bytes) {
    hash = (hash ^ std::to_integer<std::uint64_t>(b)) * 0x100'0000'01b3ull;
  }
  return hash;
}

const std::string* text_of(const json& object, const char* name) {
  const auto it = object.find(name);
  return it != object.end() && it->is_string() ? it->get_ptr<const std::string*>() : nullptr;
}

std::optional<std::uint64_t> number_of(const json& object, const char* name) {
  const auto it = object.find(name);
  if (it == object.end() || !it->is_number_unsigned()) {
    return std::nullopt;
  }
  return it->get<std::uint64_t>();
}

/// Bytes of the hex field `name`, whose checksum is in field `sum`.
Result<std::vector<std::byte>> checked_bytes(const json& object, const char* name, std::size_t bytes_max) {
  const std::string* text = text_of(object, name);
  const auto sum = number_of(object, "sum");
  auto bytes = text != nullptr ? from_hex(*text, bytes_max) : std::nullopt;
  if (!bytes || bytes->empty() || !sum) {
    return fail(Code::kProtocol, "ucx: field '{}' is not 1..{} bytes of hex with a 'sum'", name, bytes_max);
  }
  if (const std::uint64_t actual = checksum(*bytes); actual != *sum) {
    return fail(Code::kCorrupt, "ucx: field '{}' has checksum {:x}, announced was {:x}", name, actual, *sum);
  }
  return std::move(*bytes);
}

json region_json(const RemotePool::Region& region) {
  return json{{"base", region.base},
              {"bytes", region.bytes},
              {"key", to_hex(region.key)},
              {"sum", checksum(region.key)}};
}

Result<RemotePool::Region> parse_region(const json& object) {
  if (!object.is_object()) {
    return fail(Code::kProtocol, "ucx: a region of the peer's pool is not an object");
  }
  RemotePool::Region region;
  const auto base = number_of(object, "base");
  const auto bytes = number_of(object, "bytes");
  if (!base || !bytes || *bytes == 0 || *base > UINT64_MAX - *bytes) {
    return fail(Code::kProtocol, "ucx: a region of the peer's pool has no legal base and bytes");
  }
  region.base = *base;
  region.bytes = *bytes;
  KVF_TRY(region.key, checked_bytes(object, "key", kKeyMax));
  return region;
}

Result<RemotePool::Buffer> parse_buffer(const json& object, const RemotePool& pool) {
  if (!object.is_object()) {
    return fail(Code::kProtocol, "ucx: a buffer of the peer's pool is not an object");
  }
  const std::uint64_t region = number_of(object, "region").value_or(UINT64_MAX);
  const std::uint64_t base = number_of(object, "base").value_or(0);
  const std::uint64_t rows = number_of(object, "rows").value_or(0);
  const std::uint64_t row_bytes = number_of(object, "row_bytes").value_or(0);
  if (region >= pool.regions.size() || base == 0 || rows == 0 || row_bytes == 0 || row_bytes > UINT32_MAX) {
    return fail(Code::kProtocol,
                "ucx: a buffer of the peer's pool has region {} of {}, base {}, rows {}, row_bytes {}",
                region, pool.regions.size(), base, rows, row_bytes);
  }
  const auto& home = pool.regions[region];
  if (base < home.base || base - home.base > home.bytes ||
      rows > (home.bytes - (base - home.base)) / row_bytes) {
    return fail(Code::kProtocol,
                "ucx: buffer at {:x} with {} rows of {} bytes is outside its region of {} bytes", base, rows,
                row_bytes, home.bytes);
  }
  RemotePool::Buffer buffer;
  buffer.region = static_cast<std::uint32_t>(region);
  buffer.base = base;
  buffer.rows = rows;
  buffer.row_bytes = static_cast<std::uint32_t>(row_bytes);
  return buffer;
}

}  // namespace

Token random_token() {
  Token token;
  fill_random(token);
  return token;
}

Session random_session() {
  Session session = 0;
  while (session == 0) {
    session = random_u64();
  }
  return session;
}

bool same_token(const Token& a, const Token& b) {
  std::byte difference{0};
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference |= a[i] ^ b[i];
  }
  return difference == std::byte{0};
}

std::string encode_offer(const OfferText& offer) {
  return json{{"version", kOfferVersion},
              {"ucx", offer.version},
              {"transports", std::string(to_string(offer.transports))},
              {"puts", offer.puts},
              {"address", to_hex(offer.address)},
              {"sum", checksum(offer.address)},
              {"token", to_hex(offer.token)}}
      .dump();
}

Result<OfferText> decode_offer(std::string_view text) {
  const json object = json::parse(text, nullptr, false);
  if (!object.is_object()) {
    return fail(Code::kProtocol, "ucx: the offer is not a JSON object");
  }
  if (const auto version = number_of(object, "version"); !version || *version != kOfferVersion) {
    return fail(Code::kMismatch, "ucx: the offer has format version {}, this build reads {}",
                version ? std::to_string(*version) : "none", kOfferVersion);
  }
  OfferText offer;
  const std::string* ucx_version = text_of(object, "ucx");
  const std::string* transports = text_of(object, "transports");
  const std::string* token = text_of(object, "token");
  const auto puts = object.find("puts");
  if (ucx_version == nullptr || transports == nullptr || token == nullptr || puts == object.end() ||
      !puts->is_boolean()) {
    return fail(Code::kProtocol, "ucx: the offer lacks ucx, transports, token or puts");
  }
  offer.version = *ucx_version;
  offer.puts = puts->get<bool>();
  KVF_TRY(offer.transports, parse_ucx_transports(*transports));
  KVF_TRY(offer.address, checked_bytes(object, "address", kAddressMax));
  const auto token_bytes = from_hex(*token, offer.token.size());
  if (!token_bytes || token_bytes->size() != offer.token.size()) {
    return fail(Code::kProtocol, "ucx: the offer's token is not {} bytes of hex", offer.token.size());
  }
  std::memcpy(offer.token.data(), token_bytes->data(), offer.token.size());
  return offer;
}

void put_u64(std::byte* out, std::uint64_t value) {
  for (int i = 0; i < 8; ++i) {
    out[i] = static_cast<std::byte>(value >> (8 * i));
  }
}

std::uint64_t get_u64(const std::byte* in) {
  std::uint64_t value = 0;
  for (int i = 0; i < 8; ++i) {
    value |= std::to_integer<std::uint64_t>(in[i]) << (8 * i);
  }
  return value;
}

void encode_hello(const Hello& hello, std::span<std::byte, kHelloBytes> out) {
  for (int i = 0; i < 4; ++i) {
    out[static_cast<std::size_t>(i)] = static_cast<std::byte>(kHelloMagic >> (8 * i));
  }
  std::memcpy(out.data() + 4, hello.token.data(), hello.token.size());
  put_u64(out.data() + 20, hello.session);
}

Result<Hello> decode_hello(std::span<const std::byte> data) {
  std::uint32_t magic = 0;
  for (std::size_t i = 0; i < 4 && data.size() == kHelloBytes; ++i) {
    magic |= std::to_integer<std::uint32_t>(data[i]) << (8 * i);
  }
  if (magic != kHelloMagic) {
    return fail(Code::kProtocol, "ucx: a hello of {} bytes has the wrong form", data.size());
  }
  Hello hello;
  std::memcpy(hello.token.data(), data.data() + 4, hello.token.size());
  hello.session = get_u64(data.data() + 20);
  if (hello.session == 0) {
    return fail(Code::kProtocol, "ucx: a hello has session 0");
  }
  return hello;
}

void encode_block_message(const BlockMessage& message, std::span<std::byte, kBlockMessageBytes> out) {
  put_u64(out.data(), message.session);
  put_u64(out.data() + 8, message.put_bytes);
  encode_block(message.block, out.subspan<16, kBlockHeaderBytes>());
}

Result<BlockMessage> decode_block_message(std::span<const std::byte> data) {
  if (data.size() != kBlockMessageBytes) {
    return fail(Code::kProtocol, "ucx: a block's header has {} bytes, must be {}", data.size(),
                kBlockMessageBytes);
  }
  BlockMessage message;
  message.session = get_u64(data.data());
  message.put_bytes = get_u64(data.data() + 8);
  KVF_TRY(message.block, decode_block(data.subspan(16)));
  if (message.put_bytes != 0 && message.block.type != BlockType::kNotice) {
    return fail(Code::kProtocol, "ucx: a block that is no notice announces {} put bytes", message.put_bytes);
  }
  return message;
}

std::string encode_pool(const RemotePool& pool) {
  json regions = json::array();
  for (const auto& region : pool.regions) {
    regions.push_back(region_json(region));
  }
  json buffers = json::array();
  for (const auto& buffer : pool.buffers) {
    buffers.push_back({{"region", buffer.region},
                       {"base", buffer.base},
                       {"rows", buffer.rows},
                       {"row_bytes", buffer.row_bytes}});
  }
  return json{{"rank", pool.rank}, {"regions", std::move(regions)}, {"buffers", std::move(buffers)}}.dump();
}

Result<RemotePool> decode_pool(std::string_view text) {
  const json object = json::parse(text, nullptr, false);
  const auto rank = object.is_object() ? number_of(object, "rank") : std::nullopt;
  if (!rank || *rank > UINT32_MAX) {
    return fail(Code::kProtocol, "ucx: the peer's pool has no legal rank");
  }
  RemotePool pool;
  pool.rank = static_cast<RankIndex>(*rank);
  const auto regions = object.find("regions");
  const auto buffers = object.find("buffers");
  if (regions == object.end() || !regions->is_array() || buffers == object.end() || !buffers->is_array() ||
      regions->size() > kBuffersMax || buffers->size() > kBuffersMax) {
    return fail(Code::kProtocol, "ucx: the peer's pool of rank {} lacks regions or buffers", *rank);
  }
  for (const json& item : *regions) {
    KVF_TRY(auto region, parse_region(item));
    pool.regions.push_back(std::move(region));
  }
  for (const json& item : *buffers) {
    KVF_TRY(const auto buffer, parse_buffer(item, pool));
    pool.buffers.push_back(buffer);
  }
  return pool;
}

}  // namespace kvferry::ucx
