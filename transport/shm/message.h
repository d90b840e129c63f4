#pragma once
// What the two ends of a shm session say to each other over their Unix socket: JSON texts, one per frame (see
// channel.h).
//
//   send end     hello {version, token}                    first frame
//                notice {transfer, serial, bytes, blocks}  all bytes of the transfer are visible
//   receive end  welcome {version, epoch, pools}           answer to hello; `pools` pool frames follow
//                pool {serial, layout, fds}                `fds` descriptors arrive with this frame
//                pool_gone {rank, serial}
//                refused {code, message}                   then the socket closes
//
// A pool's serial is never used twice by one daemon, so a notice names exactly the memory it wrote into.
// Every number is range-checked here; nothing that comes out of parse_*() needs a second look at its type or
// size.

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>

#include "common/base/ids.h"
#include "common/base/result.h"
#include "common/pool/pool.h"

namespace kvferry::shm {

inline constexpr std::uint64_t kProtocolVersion = 1;
inline constexpr std::size_t kBuffersMax = 4096;
inline constexpr std::size_t kAuxFieldsMax = 256;
inline constexpr std::size_t kDescriptorsMax = 1024;  // of one pool
inline constexpr std::size_t kPoolsMax = 1024;        // of one peer
inline constexpr RankIndex kRankMax = (1u << 20) - 1;

struct Hello {
  std::string token;  // 32 lower-case hex digits
};
struct Notice {
  TransferKey key;
  std::uint64_t serial = 0;  // of the pool that was written into
  std::uint64_t bytes = 0;
  std::uint64_t blocks = 0;
};
struct Welcome {
  Epoch epoch = 0;
  std::uint32_t pools = 0;
};
struct PoolAdded {
  std::uint64_t serial = 0;
  std::uint32_t fds = 0;
  PoolLayout layout;
};
struct PoolGone {
  RankIndex rank = 0;
  std::uint64_t serial = 0;
};
struct Refused {
  Error error;
};

using FromSender = std::variant<Hello, Notice>;
using FromReceiver = std::variant<Welcome, PoolAdded, PoolGone, Refused>;

std::string to_text(const Hello& message);
std::string to_text(const Notice& message);
std::string to_text(const Welcome& message);
std::string to_text(const PoolAdded& message);
std::string to_text(const PoolGone& message);
std::string to_text(const Refused& message);

/// Errors are kProtocol and name the field and what it holds.
Result<FromSender> parse_from_sender(std::string_view text);
Result<FromReceiver> parse_from_receiver(std::string_view text);

/// What the decode daemon's handshake carries for one peer. The boot id spares a connection between hosts;
/// that both daemons really share a kernel and a file system is proven by the connection and the token, never
/// by an address (two hosts may have the same address, and one host many).
struct Offer {
  std::string host_id;  // boot_id()
  std::string path;
  std::string token;
  Epoch epoch = 0;
};
std::string to_text(const Offer& offer);
Result<Offer> parse_offer(std::string_view text);

}  // namespace kvferry::shm
