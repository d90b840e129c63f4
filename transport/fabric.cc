#include "transport/fabric.h"

namespace kvferry {

std::string_view to_string(FabricKind kind) {
  switch (kind) {
    case FabricKind::kInproc:
      return "inproc";
    case FabricKind::kShm:
      return "shm";
    case FabricKind::kTcp:
      return "tcp";
    case FabricKind::kUcx:
      return "ucx";
  }
  return "unknown";
}

Result<FabricKind> parse_fabric_kind(std::string_view text) {
  for (const FabricKind kind : {FabricKind::kInproc, FabricKind::kShm, FabricKind::kTcp, FabricKind::kUcx}) {
    if (text == to_string(kind)) {
      return kind;
    }
  }
  return fail(Code::kInvalid, "fabric is '{}', but must be one of inproc, shm, tcp, ucx", text);
}

}  // namespace kvferry
