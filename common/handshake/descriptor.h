#pragma once
// What one daemon says about itself in a handshake: the body of POST /v1/handshake and half of its answer.
// Unknown keys are ignored, so that a newer peer can say more; everything known is checked for type and
// range. Epochs travel as 16 hexadecimal digits, all other numbers are JSON integers from 0 to 2^53. A
// decoded Descriptor is well formed, not yet compatible: see rules.h.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/host_port.h"
#include "common/base/ids.h"
#include "common/base/result.h"
#include "common/model/geometry.h"
#include "common/topology/topology.h"

namespace kvferry {

enum class Role : std::uint8_t { kPrefill, kDecode };
std::string_view to_string(Role role);  // "prefill", "decode"

/// What every Descriptor stays within; a document beyond them is refused.
struct DescriptorLimits {
  static constexpr std::size_t kBytes = std::size_t{4} << 20;  // of the JSON text
  static constexpr std::size_t kText = 256;
  static constexpr std::size_t kRanks = 1024;    // local ranks of one daemon
  static constexpr std::size_t kBuffers = 4096;  // per rank
  static constexpr std::size_t kAux = 64;
  static constexpr std::size_t kFabrics = 16;
  static constexpr std::size_t kFabricData = std::size_t{256} << 10;  // bytes of JSON text per fabric
  static constexpr std::size_t kLayers = 4096;
  static constexpr std::size_t kStateTensors = 8;
  static constexpr std::size_t kStateBlocks = 16;
  static constexpr std::size_t kComponents = 64;
  static constexpr std::size_t kLimits = 64;
  static constexpr std::uint32_t kParallel = kParallelSizeMax;  // each of tp, pp, cp, dp
  static constexpr std::uint64_t kRanksTotal = 65536;           // tp*pp*cp*dp
  static constexpr std::uint32_t kPageSize = 1U << 16;          // tokens; times any DCP fits 32 bits
  static constexpr std::uint64_t kItemLen = UINT32_MAX;         // so that a row always fits 32 bits
  static constexpr std::uint64_t kPages =
      (std::uint64_t{1} << 31) - 1;                      // page ids are int32 on SGLang's wire
  static constexpr std::uint32_t kDimension = 1U << 20;  // heads, head and latent sizes
};

struct ModelIdentity {
  std::string name;      // empty = unknown
  std::string revision;  // empty = unknown
  std::string hash;      // of the weights or the config; empty = unknown
  friend bool operator==(const ModelIdentity&, const ModelIdentity&) = default;
};

struct BufferDescription {
  std::uint32_t layer = 0;  // global layer id
  BufferKind kind = BufferKind::kLatent;
  std::uint64_t item_len = 0;  // bytes of one page
  std::uint64_t pages = 0;
  friend bool operator==(const BufferDescription&, const BufferDescription&) = default;
};

struct AuxDescription {
  std::string name;
  std::uint64_t width = 0;  // bytes of one slot
  std::uint64_t slots = 0;
  friend bool operator==(const AuxDescription&, const AuxDescription&) = default;
};

/// One rank whose pool is attached to this daemon.
struct RankDescription {
  RankIndex index = 0;
  RankCoord coord;
  std::optional<HostPort> address;         // of the daemon that serves it, where it is not the sender
  std::vector<BufferDescription> buffers;  // in pool order
  std::vector<AuxDescription> aux;         // in slot order
  friend bool operator==(const RankDescription&, const RankDescription&) = default;
};

struct FabricDescription {
  std::string kind;         // "shm", "tcp", "ucx", ...
  std::string data = "{}";  // a JSON object as text, opaque here; compact after decoding
  friend bool operator==(const FabricDescription&, const FabricDescription&) = default;
};

struct Descriptor {
  Role role = Role::kPrefill;
  std::uint32_t protocol_min = 1;
  std::uint32_t protocol_max = 1;
  std::string build;
  Epoch epoch = 0;
  std::string instance;  // the daemon's configured name
  std::string host_id;   // equal on two daemons exactly when they share a host; empty = unknown
  ModelIdentity model;
  ModelGeometry geometry;
  std::uint32_t page_size = 0;  // physical, tokens
  Topology topology;
  std::vector<std::string> state_components;  // type names in transfer order
  std::vector<RankDescription> ranks;
  std::vector<FabricDescription> fabrics;  // in order of preference
  std::map<std::string, std::uint64_t> limits;
};

/// One line of JSON. Every fabric's `data` must be a JSON object (our own fabrics make it).
std::string encode_descriptor(const Descriptor& descriptor);

/// kInvalid names every wrong field by its path (the first eight in full) with what was expected and found.
Result<Descriptor> decode_descriptor(std::string_view text);

}  // namespace kvferry
