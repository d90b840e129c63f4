#pragma once
// The send ends of the configured fabrics, in order of preference.

#include <functional>
#include <memory>
#include <vector>

#include "common/daemon/config.h"
#include "transport/fabric.h"

namespace kvferry::prefill {

/// The sink of one fabric; events say nothing of the fabric they come from.
using SinkFor = std::function<FabricSink(FabricKind)>;

/// Creates every fabric that config.fabrics names, or says which one cannot run here and why.
Result<std::vector<std::unique_ptr<SendFabric>>> open_fabrics(const DaemonConfig& config,
                                                              const SinkFor& sink_for);

}  // namespace kvferry::prefill
