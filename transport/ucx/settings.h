#pragma once
// The UCX settings that KVFerry fixes, as pure text. They go into the one context through ucp_config_modify,
// so nothing of the process's environment changes and nothing in the environment can undo them.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "transport/ucx/ucx_options.h"

namespace kvferry::ucx {

using Setting = std::pair<std::string, std::string>;

/// `version` is UCX's run-time version as major * 100 + minor.
std::vector<Setting> settings(const UcxOptions& options, unsigned version);

/// Payload of one active message. One segment holds it together with the header, so that UCX hands the
/// receiver its own receive buffer and does not assemble a copy.
std::uint32_t payload_max(const UcxOptions& options);

/// Largest legal value of what UCX reports as its longest active-message header; it reveals the segment size
/// that is really in force. 64 KiB segments and above corrupt data on shared memory (16-bit length in the
/// FIFO).
std::uint64_t am_header_limit(const UcxOptions& options);
/// Smallest value that still fits payload_max().
std::uint64_t am_header_need(const UcxOptions& options);

std::uint32_t window(const UcxOptions& options);

}  // namespace kvferry::ucx
