#pragma once
// Small facts of a running daemon that both sides need: what it says of itself, and whether an engine's pool
// fits the configuration.

#include <string>
#include <vector>

#include "common/daemon/config.h"
#include "common/engine/server.h"
#include "common/handshake/descriptor.h"

namespace kvferry {

/// Descriptor of this daemon without ranks and fabrics.
Descriptor describe(Role role, const DaemonConfig& config, Epoch epoch);
/// One attached rank for the Descriptor.
RankDescription describe_rank(const DaemonConfig& config, const PoolLayout& layout);

/// Which rank an attaching engine is, after checking coordinates, page size, dtype and every buffer against
/// what the configuration says this rank owns. All problems in one message, each with both values.
Result<RankIndex> check_attach(const DaemonConfig& config, const EngineAttach& attach);

/// Tells systemd (NOTIFY_SOCKET) about readiness or stopping; nothing happens without it.
void notify_systemd(const char* state);

}  // namespace kvferry
