#include "common/daemon/observer.h"

#include "common/metrics/metrics.h"

namespace kvferry {
namespace {

double seconds(std::int64_t ns) {
  return static_cast<double>(ns) / 1e9;
}

MetricsOptions options(const DaemonConfig& config) {
  MetricsOptions out;
  out.fabrics = config.fabrics;
  for (const std::string_view rule : rule_ids()) {
    out.rules.emplace_back(rule);
  }
  return out;
}

}  // namespace

Observer::Observer(Role role, const DaemonConfig& config)
    : role_(role), metrics_(std::make_unique<Metrics>(options(config))) {}

Observer::~Observer() = default;

void Observer::transfer_ended(const TransferReport& report, const std::string& fabric) {
  if (report.bytes > 0) {
    metrics_->count_moved(role_ == Role::kPrefill ? MoveDirection::kSent : MoveDirection::kReceived, fabric,
                          report.bytes, report.writes);
  }
  switch (report.state) {
    case TransferState::kLanded: {
      TransferSeconds taken;
      taken.queue = seconds(report.queue_ns);
      taken.total = seconds(report.total_ns);
      if (role_ == Role::kPrefill) {
        taken.plan = seconds(report.plan_ns);
        taken.pack = seconds(report.pack_ns);
        taken.post = seconds(report.post_ns);
        taken.land = seconds(report.land_ns);
      }
      metrics_->count_landed(report.bytes, taken);
      break;
    }
    case TransferState::kFailed:
      metrics_->count_failed(report.error.code);
      break;
    case TransferState::kAborted:
      metrics_->count_aborted();
      break;
  }
}

void Observer::handshake(const std::vector<Violation>& violations, bool accepted) {
  if (accepted) {
    metrics_->count_handshake_accepted();
    return;
  }
  std::vector<std::string_view> rules;
  for (const Violation& violation : violations) {
    if (violation.severity == Severity::kError) {
      rules.push_back(violation.rule);
    }
  }
  metrics_->count_handshake_refused(rules);
}

void Observer::peer_up(PeerId peer, const std::string& name, const std::string& fabric,
                       const std::string& carries) {
  metrics_->set_peer_fabric(peer, name, fabric, carries);
}

void Observer::peer_gone(PeerId peer) {
  metrics_->remove_peer(peer);
}

void Observer::block_rejected() {
  metrics_->count_rejected_block();
}

void Observer::gauges(const Gauges& now) {
  metrics_->set_transfers_live(now.rooms);
  metrics_->set_rooms_waiting(now.waiting);
  metrics_->set_pages({now.engine_pages, now.live_pages, now.quarantined_pages});
  metrics_->set_engines(now.engines);
  metrics_->set_peers(now.peers);
  if (now.stale_messages > stale_seen_) {
    metrics_->count_stale("control", now.stale_messages - stale_seen_);
    stale_seen_ = now.stale_messages;
  }
}

std::string Observer::text() const {
  return metrics_->text();
}

}  // namespace kvferry
