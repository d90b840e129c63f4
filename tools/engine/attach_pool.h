#pragma once
// The one place that describes a rank's memory to a daemon.

#include <cstdint>
#include <string>

#include "common/engine/kvferry.h"
#include "common/topology/topology.h"
#include "tools/engine/rank_memory.h"

namespace kvferry {

struct PoolAttachment {
  const std::string& socket;  // of the daemon
  const RankMemory& memory;   // may be attached to any number of daemons
  RankCoord coord;
  std::uint32_t page_size = 0;  // tokens
  const std::string& dtype;
};

/// kvf_attach(): 0 and an engine that the caller detaches, or a negative kvf_code, null and the reason.
int attach_pool(const PoolAttachment& attachment, kvf_engine*& engine, std::string& reason);

}  // namespace kvferry
