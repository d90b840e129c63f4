#pragma once
// What two UCX fabrics say to each other beside the blocks of transport/block.h. All integers little-endian.
//
//   offer    JSON text inside the authenticated handshake: UCX version, transports, the receiver's worker
//   address
//            (hex, with a checksum, because UCX does not survive a damaged one) and a random token
//   hello    sender -> receiver: magic "KVU1" u32 | token 16 bytes | session u64; payload: the sender's
//   worker
//            address. Proves the token, names the session that every later message carries.
//   welcome  receiver -> sender: session u64. The hello was accepted.
//   block    either way: session u64 | put_bytes u64 | block header of transport/block.h; payload: its bytes.
//            put_bytes is used by notices only: bytes of the transfer that went by puts.
//   pool     receiver -> sender, put mode: session u64; payload: JSON of one pool and its keys
//   no_pool  receiver -> sender, put mode: session u64 | rank u64
//   bye      either way: session u64. The other end closes on purpose.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/result.h"
#include "transport/block.h"
#include "transport/ucx/ucx_options.h"

namespace kvferry::ucx {

enum MessageId : std::uint32_t {
  kHello = 1,
  kWelcome = 2,
  kBlock = 3,
  kPoolKeys = 4,
  kNoPool = 5,
  kBye = 6,
};

using Token = std::array<std::byte, 16>;
using Session = std::uint64_t;

Token random_token();
Session random_session();  // never 0
/// Time does not depend on where the tokens differ.
bool same_token(const Token& a, const Token& b);

struct OfferText {
  std::string version;  // UCX's, "1.13.1"
  UcxTransports transports = UcxTransports::kRdma;
  bool puts = false;
  std::vector<std::byte> address;
  Token token{};
};
std::string encode_offer(const OfferText& offer);
Result<OfferText> decode_offer(std::string_view json);

struct Hello {
  Token token{};
  Session session = 0;
};
inline constexpr std::size_t kHelloBytes = 28;
void encode_hello(const Hello& hello, std::span<std::byte, kHelloBytes> out);
Result<Hello> decode_hello(std::span<const std::byte> data);

inline constexpr std::size_t kSessionBytes = 8;
void put_u64(std::byte* out, std::uint64_t value);
std::uint64_t get_u64(const std::byte* in);

inline constexpr std::size_t kBlockMessageBytes = 16 + kBlockHeaderBytes;
struct BlockMessage {
  Session session = 0;
  std::uint64_t put_bytes = 0;
  BlockHeader block;
};
void encode_block_message(const BlockMessage& message, std::span<std::byte, kBlockMessageBytes> out);
Result<BlockMessage> decode_block_message(std::span<const std::byte> data);

/// One decode pool as a sender of puts sees it: registered regions, and where the buffers lie in them.
struct RemotePool {
  struct Region {
    std::uint64_t base = 0;
    std::uint64_t bytes = 0;
    std::vector<std::byte> key;  // packed rkey
  };
  struct Buffer {
    std::uint32_t region = 0;
    std::uint64_t base = 0;
    std::uint64_t rows = 0;
    std::uint32_t row_bytes = 0;
  };
  RankIndex rank = 0;
  std::vector<Region> regions;
  std::vector<Buffer> buffers;
};
std::string encode_pool(const RemotePool& pool);
/// Also checks that every buffer lies inside its region and every key has its checksum.
Result<RemotePool> decode_pool(std::string_view json);

}  // namespace kvferry::ucx
