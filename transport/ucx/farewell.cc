#include "transport/ucx/farewell.h"

#include "common/base/clock.h"

namespace kvferry::ucx {

void Farewell::begin(Endpoint& endpoint, Outbox& outbox, Session session, bool bye) {
  if (begun_) {
    return;
  }
  begun_ = true;
  bye_ = bye;
  deadline_ = steady_now() + kGraceNs;
  if (bye_) {
    outbox.push_session(kBye, session);
  }
  step(endpoint, outbox);
}

bool Farewell::step(Endpoint& endpoint, Outbox& outbox) {
  if (bye_ && !endpoint.failed() && steady_now() < deadline_) {
    outbox.flush(endpoint);
    if (!outbox.empty() || !endpoint.idle()) {
      return false;
    }
  }
  bye_ = false;
  endpoint.shut();
  return endpoint.closed();
}

}  // namespace kvferry::ucx
