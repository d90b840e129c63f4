// What the decode daemon does about prefill services, and what it answers over HTTP.

#include <nlohmann/json.hpp>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/daemon/runtime.h"
#include "decode/daemon.h"

namespace kvferry::decode {

using nlohmann::json;

Descriptor Daemon::self() const {
  Descriptor out = describe(Role::kDecode, config_, epoch_);
  for (const auto& [rank, pool] : pools_) {
    out.ranks.push_back(describe_rank(config_, pool->layout()));
  }
  return out;
}

std::vector<message::RankUp> Daemon::announcements() const {
  return rooms_.announcements();
}

bool Daemon::wanted(ServiceId service) const {
  return rooms_.service_wanted(service);
}

void Daemon::on_service_ready(ServiceId service, ServiceInfo info) {
  Actions actions;
  rooms_.service_ready(steady_now(), service, std::move(info), actions);
  perform(actions);
}

void Daemon::on_service_unreachable(ServiceId service, const Error& error) {
  rooms_.service_unreachable(service, error);
}

void Daemon::on_service_refused(ServiceId service, const Error& error,
                                const std::vector<Violation>& violations) {
  if (!violations.empty()) {
    observer_.handshake(violations, false);
  }
  Actions actions;
  rooms_.service_refused(steady_now(), service, error, actions);
  perform(actions);
}

void Daemon::on_accepted(const std::vector<Violation>& warnings) {
  observer_.handshake(warnings, true);
}

void Daemon::on_up(PeerId peer, ReceiveFabric& fabric, const std::string& carries) {
  peer_fabric_[peer] = &fabric;
  observer_.peer_up(peer, services_->instance(peer), std::string(to_string(fabric.kind())), carries);
  Actions actions;
  rooms_.peer_ready(steady_now(), peer, fabric.receiver_places_bytes(), actions);
  perform(actions);
}

void Daemon::on_control(PeerId peer, const ControlMessage& message) {
  Actions actions;
  rooms_.on_message(steady_now(), peer, message, actions);
  perform(actions);
}

void Daemon::on_lost(PeerId peer, const Error& error) {
  Actions actions;
  rooms_.peer_lost(steady_now(), peer, error, actions);
  perform(actions);
  observer_.peer_gone(peer);
}

Result<void> Daemon::start_http() {
  HttpLimits limits;
  limits.body_bytes_max = config_.limits.http_body_bytes;
  limits.header_bytes_max = config_.limits.http_header_bytes;
  limits.connections_max = config_.limits.http_connections;
  http_ = std::make_unique<HttpServer>(io_, limits,
                                       [this](const HttpRequest& request) { return serve(request); });
  KVF_TRY(address_, http_->listen(config_.metrics_listen));
  return {};
}

std::string Daemon::status_json() const {
  const Rooms::Stats stats = rooms_.stats();
  json peers = json::array();
  for (const Services::Row& row : services_->rows()) {
    peers.push_back({{"instance", row.instance},
                     {"address", row.address},
                     {"fabric", row.fabric},
                     {"carries", row.carries},
                     {"up", row.up},
                     {"error", row.error}});
  }
  json ranks = json::array();
  for (const auto& [rank, pool] : pools_) {
    ranks.push_back({{"rank", rank},
                     {"pages", page_count(pool->layout())},
                     {"bytes", pool->mapped_bytes()},
                     {"attached", rooms_.rank_attached(rank)}});
  }
  return json{{"role", "decode"},
              {"version", KVF_VERSION},
              {"instance", config_.instance},
              {"epoch", fmt::format("{:016x}", epoch_)},
              {"model", config_.model.name},
              {"topology", to_string(config_.topology)},
              {"uptime_seconds", static_cast<double>(steady_now() - started_) / 1e9},
              {"ranks", ranks},
              {"peers", peers},
              {"rooms", {{"alive", stats.rooms}, {"waiting", stats.waiting}}},
              {"pages", {{"live", stats.live_pages}, {"quarantine", stats.quarantined_pages}}},
              {"stale_messages", stats.stale_messages}}
      .dump();
}

void Daemon::update_gauges() {
  const Rooms::Stats stats = rooms_.stats();
  Gauges now;
  now.rooms = stats.rooms;
  now.waiting = stats.waiting;
  now.live_pages = stats.live_pages;
  now.quarantined_pages = stats.quarantined_pages;
  now.stale_messages = stats.stale_messages;
  for (const auto& [rank, pool] : pools_) {
    now.engine_pages += page_count(pool->layout());
  }
  now.engine_pages -= std::min(now.engine_pages, stats.live_pages + stats.quarantined_pages);
  now.engines = pools_.size();
  now.peers = services_->connected();
  observer_.gauges(now);
}

HttpResponse Daemon::serve(const HttpRequest& request) {
  if (auto refusal = check_bearer(config_.metrics_token, request)) {
    return *std::move(refusal);
  }
  const auto plain = [](int status, std::string text) {
    return HttpResponse{status, "text/plain; charset=utf-8", std::move(text), {}};
  };
  if (request.method != "GET" && request.method != "HEAD") {
    return http_error(405, "use GET");
  }
  if (request.path == "/metrics") {
    update_gauges();
    return HttpResponse{200, "text/plain; version=0.0.4; charset=utf-8", observer_.text(), {}};
  }
  if (request.path == "/healthz") {
    return plain(200, "OK\n");
  }
  if (request.path == "/readyz") {
    std::string missing;
    for (const RankIndex rank : config_.ranks) {
      if (!rooms_.rank_attached(rank)) {
        missing += fmt::format("{}{}", missing.empty() ? "" : ", ", rank);
      }
    }
    return missing.empty() ? plain(200, "OK\n")
                           : plain(503, fmt::format("waiting for the engines of ranks {}\n", missing));
  }
  if (request.path == "/v1/status") {
    return HttpResponse{200, "application/json", status_json(), {}};
  }
  return http_error(404, "no such path; see /metrics, /healthz, /readyz, /v1/status");
}

}  // namespace kvferry::decode
