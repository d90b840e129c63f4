#pragma once
// How a connection ends on purpose: say bye, let what is under way finish for a short while, then force it
// down. Over shared memory nothing else tells a living peer that the connection is over, and forcing an
// endpoint down while operations are queued on it is where UCX is weakest. A frozen peer costs the grace time
// and no more.

#include <cstdint>

#include "transport/ucx/endpoint.h"
#include "transport/ucx/outbox.h"

namespace kvferry::ucx {

class Farewell {
 public:
  static constexpr std::int64_t kGraceNs = 300'000'000;

  /// The endpoint takes no more data from now on; `bye` false when the connection is broken anyway.
  void begin(Endpoint& endpoint, Outbox& outbox, Session session, bool bye);
  bool begun() const { return begun_; }
  /// Moves on; true when the endpoint is closed and may be destroyed.
  bool step(Endpoint& endpoint, Outbox& outbox);

 private:
  bool begun_ = false;
  bool bye_ = false;
  std::int64_t deadline_ = 0;
};

}  // namespace kvferry::ucx
