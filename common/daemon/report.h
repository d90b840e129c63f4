#pragma once
// How one transfer (one room between one prefill rank and one decode rank) ended, for metrics and logs.

#include <cstdint>
#include <string>

#include "common/base/error.h"
#include "common/base/ids.h"

namespace kvferry {

enum class TransferState : std::uint8_t { kLanded, kFailed, kAborted };

struct TransferReport {
  TransferKey key;
  PeerId peer = 0;
  TransferState state = TransferState::kFailed;
  Error error{};              // of a transfer that did not land
  std::uint64_t bytes = 0;    // payload on the wire, each copy once
  std::uint64_t writes = 0;   // blocks, puts or copies posted
  std::int64_t queue_ns = 0;  // both sides known -> first post
  std::int64_t plan_ns = 0;
  std::int64_t pack_ns = 0;
  std::int64_t post_ns = 0;   // first post -> source pages read
  std::int64_t land_ns = 0;   // source pages read -> landed
  std::int64_t total_ns = 0;  // both sides known -> landed
};

}  // namespace kvferry
