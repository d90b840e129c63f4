#pragma once
// One control message of every kind, no field of which has its default value, and helpers to see and change
// what travels.

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "common/control/messages.h"

namespace kvferry::test {

inline std::vector<ControlMessage> one_of_each() {
  const GrantKey key{.room = kRoomMax - 5, .generation = UINT64_MAX, .decode_rank = 65535};
  return {
      message::RankUp{.rank = 3,
                      .page_size = 64,
                      .buffers = {{.layer = 1, .kind = BufferKind::kValue, .row_bytes = 1024, .pages = 99},
                                  {.layer = 60, .kind = BufferKind::kLatent, .row_bytes = 1152, .pages = 7}},
                      .aux = {{.name = "bootstrap_room", .width = 16, .slots = 128}}},
      message::RankGone{.rank = 7},
      message::Grant{.key = key,
                     .targets = {0, 5, 65535},
                     .prefill_dp = 2,
                     .pages = {0, 1, 258, UINT32_MAX},
                     .prefix = 64,
                     .tokens = 1000,
                     .has_aux = true,
                     .aux_slot = 12,
                     .hybrid = {{9}, 896, 0},
                     .verify = 16},
      message::Stop{.key = key, .targets = {1, 2}, .code = Code::kDeadline, .reason = "too late"},
      message::Landed{.key = key},
      message::FabricStatus{.kind = "tcp", .carries = "tcp 2x"},
      message::TransferFailed{.key = {key, 9}, .code = Code::kTransport, .reason = "h\xC3\xA9"},
      message::TransferDrained{.key = {key, 9}},
      message::TransferDigest{
          .key = {key, 9}, .tokens_end = 990, .digest = {{0, 60}, 2, {1, 2, UINT64_MAX, 1ull << 63}}},
      message::Heartbeat{.sequence = UINT64_MAX},
  };
}

inline std::string pack(const nlohmann::json& document) {
  const auto bytes = nlohmann::json::to_msgpack(document);
  return {bytes.begin(), bytes.end()};
}
inline nlohmann::json unpack(const std::string& bytes) {
  return nlohmann::json::from_msgpack(bytes);
}

}  // namespace kvferry::test
