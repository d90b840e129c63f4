// What the prefill daemon answers over HTTP: the bootstrap server with the handshake, and metrics and health.

#include <nlohmann/json.hpp>

#include "common/base/clock.h"
#include "common/daemon/runtime.h"
#include "prefill/daemon.h"

namespace kvferry::prefill {

using nlohmann::json;

Result<void> Daemon::start_http() {
  HttpLimits limits;
  limits.body_bytes_max = config_.limits.http_body_bytes;
  limits.header_bytes_max = config_.limits.http_header_bytes;
  limits.connections_max = config_.limits.http_connections;
  http_ = std::make_unique<HttpServer>(io_, limits,
                                       [this](const HttpRequest& request) { return serve(request); });
  ChannelLimits channel;
  channel.message_bytes_max = std::uint64_t{config_.limits.pages_per_room} * 4 + (1u << 20);
  http_->on_upgrade(
      "/v1/control",
      [this](const HttpRequest& request) {
        const auto nonce = authenticate(request);
        return nonce ? sessions_->admit(request)
                     : http_error(http_status(nonce.error().code), nonce.error().message);
      },
      [this](const HttpRequest& request, std::shared_ptr<Channel> opened) {
        sessions_->accepted(request, std::move(opened));
      },
      channel);
  KVF_TRY(bootstrap_, http_->listen(config_.bootstrap_listen));
  if (!config_.bootstrap_advertise.empty()) {
    bootstrap_.host = config_.bootstrap_advertise;
  }
  metrics_http_ = std::make_unique<HttpServer>(
      io_, limits, [this](const HttpRequest& request) { return serve_metrics(request); });
  KVF_TRY(metrics_address_, metrics_http_->listen(config_.metrics_listen));
  return {};
}

Descriptor Daemon::descriptor() const {
  Descriptor out = describe(Role::kPrefill, config_, epoch_);
  for (const auto& [rank, pool] : pools_) {
    out.ranks.push_back(describe_rank(config_, pool->layout()));
  }
  for (const auto& fabric : fabrics_) {
    out.fabrics.push_back({std::string(to_string(fabric->kind())), "{}"});
  }
  return out;
}

namespace {

// What routers and other tools read without a key, as they always have.
bool is_public(const HttpRequest& request) {
  const bool reads = request.method == "GET" || request.method == "HEAD";
  return (reads && (request.path == "/health" || request.path == "/route")) ||
         request.path == "/query_dp_ranks";
}

}  // namespace

Result<std::string> Daemon::authenticate(const HttpRequest& request) {
  const auto header = request.headers.find(std::string(kAuthHeader));
  if (!guard_ || (is_public(request) && header == request.headers.end())) {
    return std::string();
  }
  return guard_->check(request.method, request.target, request.body,
                       header == request.headers.end() ? "" : header->second, unix_now());
}

HttpResponse Daemon::serve(const HttpRequest& request) {
  const auto nonce = authenticate(request);
  if (!nonce) {
    return http_error(http_status(nonce.error().code), nonce.error().message);
  }
  HttpResponse response = answer(request);
  if (!nonce->empty()) {
    response.headers.emplace_back(kReplyHeader,
                                  sign_reply(guard_->key(), *nonce, response.status, response.body));
  }
  return response;
}

HttpResponse Daemon::answer(const HttpRequest& request) {
  if (const auto answer =
          routes_.handle(request.method, request.path, request.query, request.body, steady_now())) {
    HttpResponse response{answer->status, answer->content_type, answer->body, {}};
    if (!answer->allow.empty()) {
      response.headers.emplace_back("Allow", answer->allow);
    }
    return response;
  }
  const bool reads = request.method == "GET" || request.method == "HEAD";
  if (request.path == "/v1/handshake") {
    return request.method == "POST" ? sessions_->handshake(request, descriptor())
                                    : http_error(405, "use POST for /v1/handshake");
  }
  if (request.path == "/v1/topology") {
    if (!reads) {
      return http_error(405, "use GET for /v1/topology");
    }
    if (!registry_.ready()) {
      return http_error(503, fmt::format("{} of {} ranks are registered", registry_.registered(),
                                         config_.topology.rank_count()));
    }
    Descriptor out = descriptor();
    for (RankIndex rank = 0; rank < config_.topology.rank_count(); ++rank) {
      const RankCoord coord = config_.topology.coord(rank);
      const auto address = registry_.rank({coord.dp, coord.cp, coord.tp, coord.pp});
      if (!pools_.contains(rank) && address) {
        RankDescription remote{.index = rank,
                               .coord = coord,
                               .address = HostPort{address->ip, address->port},
                               .buffers = {},
                               .aux = {}};
        out.ranks.push_back(std::move(remote));
      }
    }
    json body = json::parse(encode_descriptor(out));
    body["follow_bootstrap_room"] = registry_.topology() ? registry_.topology()->follow_bootstrap_room : true;
    return HttpResponse{200, "application/json", body.dump(), {}};
  }
  if (request.path == "/v1/status") {
    return reads ? HttpResponse{200, "application/json", status_json(), {}}
                 : http_error(405, "use GET for /v1/status");
  }
  if (request.path == "/v1/control") {
    return http_error(426, "/v1/control speaks WebSocket only, after a handshake");
  }
  return http_error(404, "no such path; see /v1/status, /v1/topology, /v1/handshake, /route, /health");
}

std::string Daemon::status_json() const {
  const Rooms::Stats stats = rooms_.stats();
  json peers = json::array();
  for (const Sessions::Row& row : sessions_->rows()) {
    peers.push_back({{"instance", row.instance},
                     {"address", row.address},
                     {"fabric", row.fabric},
                     {"carries", row.carries},
                     {"up", row.up}});
  }
  json ranks = json::array();
  for (const auto& [rank, pool] : pools_) {
    ranks.push_back({{"rank", rank}, {"pages", page_count(pool->layout())}, {"bytes", pool->mapped_bytes()}});
  }
  return json{{"role", "prefill"},
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
  now.peers = sessions_->size();
  observer_.gauges(now);
}

HttpResponse Daemon::serve_metrics(const HttpRequest& request) {
  if (auto refusal = check_bearer(config_.metrics_token, request)) {
    return *std::move(refusal);
  }
  if (request.method != "GET" && request.method != "HEAD") {
    return http_error(405, "use GET");
  }
  if (request.path == "/metrics") {
    update_gauges();
    return HttpResponse{200, "text/plain; version=0.0.4; charset=utf-8", observer_.text(), {}};
  }
  if (request.path == "/healthz") {
    return HttpResponse{200, "text/plain; charset=utf-8", "OK\n", {}};
  }
  if (request.path == "/readyz") {
    std::string missing;
    for (const RankIndex rank : config_.ranks) {
      if (!pools_.contains(rank)) {
        missing += fmt::format("{}{}", missing.empty() ? "" : ", ", rank);
      }
    }
    return missing.empty() ? HttpResponse{200, "text/plain; charset=utf-8", "OK\n", {}}
                           : HttpResponse{503,
                                          "text/plain; charset=utf-8",
                                          fmt::format("waiting for the engines of ranks {}\n", missing),
                                          {}};
  }
  return http_error(404, "no such path; see /metrics, /healthz, /readyz");
}

}  // namespace kvferry::prefill
