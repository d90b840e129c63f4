#pragma once
// From what an engine sent to what a handler may rely on: a wire message plus its descriptors becomes an
// EngineAttach, EngineChunk or EngineExpectation, or a refusal that names field, value and limit.

#include <cstdint>
#include <vector>

#include "common/base/result.h"
#include "common/base/unique_fd.h"
#include "common/engine/server.h"
#include "common/engine/wire.h"

namespace kvferry {

/// What an attached engine may name from now on.
struct EngineLimits {
  std::uint64_t pages = 0;      // of its smallest buffer
  std::uint32_t aux_slots = 0;  // of its smallest aux field; 0 without aux
};
EngineLimits limits_of(const PoolLayout& layout);

Result<EngineAttach> checked_attach(wire::Attach attach, std::vector<UniqueFd> fds, int pid);
/// `fds` holds the ready descriptor, or nothing.
Result<EngineChunk> checked_chunk(wire::Send send, std::vector<UniqueFd> fds, const EngineLimits& limits);
Result<EngineExpectation> checked_expectation(wire::Expect expect, const EngineLimits& limits);

}  // namespace kvferry
