#pragma once
// The document form of a Descriptor, for documents that contain one (verdict.h).

#include <nlohmann/json.hpp>

#include "common/handshake/descriptor.h"
#include "common/handshake/json_reader.h"

namespace kvferry {

nlohmann::json descriptor_to_json(const Descriptor& descriptor);
/// Every key present; also what a daemon's configuration says under "topology".
nlohmann::json topology_to_json(const Topology& topology);

/// Notes what is wrong in the object's errors; the result counts only if there are none.
Descriptor descriptor_from_json(JsonObject object);

}  // namespace kvferry
