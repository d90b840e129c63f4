#include "decode/services.h"

#include <algorithm>
#include <boost/asio/post.hpp>
#include <nlohmann/json.hpp>
#include <set>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/http/signed_fetch.h"

namespace kvferry::decode {

using log::kv;
using nlohmann::json;

namespace {

constexpr std::int64_t kRetryNs = 1'000'000'000;

std::chrono::milliseconds connect_timeout(const DaemonConfig& config) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(config.timeouts.connect);
}

}  // namespace

Error refusal(const std::vector<Violation>& violations) {
  std::string text;
  std::size_t errors = 0;
  for (const Violation& violation : violations) {
    if (violation.severity == Severity::kError) {
      ++errors;
      text += fmt::format("{}[{}] {} ({})", text.empty() ? "" : "; ", violation.rule, violation.message,
                          violation.fix);
    }
  }
  return Error{Code::kMismatch, fmt::format("handshake refused, {} rule{} violated: {}", errors,
                                            errors == 1 ? "" : "s", text)};
}

Services::Services(boost::asio::io_context& io, const DaemonConfig& config,
                   const std::vector<std::unique_ptr<ReceiveFabric>>& fabrics, ServiceEvents& events)
    : io_(io), config_(config), fabrics_(fabrics), events_(events) {}

Result<ServiceId> Services::need(const std::string& bootstrap) {
  KVF_TRY(const HostPort address, parse_host_port(bootstrap, 8998));
  const auto known = by_address_.find(address);
  if (known == by_address_.end() && services_.size() >= config_.limits.peers) {
    return fail(Code::kExhausted, "{} prefill services are known, limits.peers is {}", services_.size(),
                config_.limits.peers);
  }
  const ServiceId id = known == by_address_.end() ? next_service_++ : known->second;
  if (known == by_address_.end()) {
    by_address_[address] = id;
    services_[id].bootstrap = address;
  }
  Service& service = services_.at(id);
  if (service.state == State::kIdle) {
    if (steady_now() >= service.retry_at) {
      connect(id);
    } else if (service.refused) {
      // Refused a moment ago: the room gets the same answer, after it has been accepted.
      boost::asio::post(io_, [this, id] {
        const Service& again = services_.at(id);
        if (again.state == State::kIdle && again.refused) {
          events_.on_service_refused(id, *again.error, {});
        }
      });
    }
  }
  return id;
}

void Services::connect(ServiceId id) {
  Service& service = services_.at(id);
  service.state = State::kFetching;
  HttpFetch fetch;
  fetch.to = service.bootstrap;
  fetch.target = "/v1/topology";
  fetch.timeout = connect_timeout(config_);
  signed_fetch(io_, config_.auth.key, std::move(fetch),
               [this, id](const Result<HttpResponse>& answer) { on_topology(id, answer); });
}

void Services::on_topology(ServiceId id, const Result<HttpResponse>& answer) {
  Service& service = services_.at(id);
  const std::string where = service.bootstrap.to_string();
  if (!answer || answer->status != 200) {
    service_failed(id,
                   answer ? Error{Code::kUnavailable, fmt::format("prefill service {} answers {}: {}", where,
                                                                  answer->status, answer->body)}
                          : Error{answer.error().code,
                                  fmt::format("prefill service {}: {}", where, answer.error().message)},
                   false, {});
    return;
  }
  auto prefill = decode_descriptor(answer->body);
  if (!prefill) {
    service_failed(
        id, Error{Code::kProtocol, fmt::format("prefill service {}: {}", where, prefill.error().message)},
        false, {});
    return;
  }
  const json extra = json::parse(answer->body, nullptr, false);
  const auto follow = extra.is_object() ? extra.find("follow_bootstrap_room") : extra.end();
  service.follow_bootstrap_room =
      !extra.is_object() || follow == extra.end() || !follow->is_boolean() || follow->get<bool>();
  Descriptor self = events_.self();
  for (const auto& fabric : fabrics_) {
    self.fabrics.push_back({std::string(to_string(fabric->kind())), "{}"});
  }
  auto violations = evaluate(*prefill, self);
  if (refuses(violations)) {
    const Error error = refusal(violations);
    service_failed(id, error, true, std::move(violations));
    return;
  }
  service.daemons.clear();
  for (const RankDescription& rank : prefill->ranks) {
    service.daemons[rank.index] = rank.address.value_or(service.bootstrap);
  }
  service.prefill = *std::move(prefill);
  service.state = State::kConnecting;
  std::set<HostPort> addresses;
  for (const auto& [rank, address] : service.daemons) {
    addresses.insert(address);
  }
  for (const HostPort& address : addresses) {
    if (find_peer(address) == 0) {
      connect_peer(address);
    }
  }
  check_ready(id);
}

void Services::check_ready(ServiceId id) {
  Service& service = services_.at(id);
  if (service.state != State::kConnecting) {
    return;
  }
  ServiceInfo info;
  info.topology = service.prefill.topology;
  info.follow_bootstrap_room = service.follow_bootstrap_room;
  for (const auto& [rank, address] : service.daemons) {
    const PeerId peer = find_peer(address);
    if (peer == 0 || !peers_.at(peer).up) {
      return;
    }
    info.peers[rank] = peer;
  }
  service.state = State::kReady;
  service.error.reset();
  service.refused = false;
  KVF_LOG_INFO("prefill service is ready", kv("bootstrap", service.bootstrap.to_string()),
               kv("instance", service.prefill.instance));
  events_.on_service_ready(id, std::move(info));
}

void Services::service_failed(ServiceId id, const Error& error, bool refused,
                              std::vector<Violation> violations) {
  Service& service = services_.at(id);
  const bool repeated = service.error == error;
  service.state = State::kIdle;
  service.retry_at = steady_now() + kRetryNs;
  service.error = error;
  service.refused = refused;
  if (!repeated) {
    KVF_LOG_WARN("prefill service is not usable", kv("bootstrap", service.bootstrap.to_string()),
                 kv("error", error.message));
  }
  if (refused) {
    events_.on_service_refused(id, error, violations);
  } else {
    events_.on_service_unreachable(id, error);
  }
}

PeerId Services::find_peer(const HostPort& address) const {
  for (const auto& [id, peer] : peers_) {
    if (peer.address == address) {
      return id;
    }
  }
  return 0;
}

std::vector<ServiceId> Services::services_of(const HostPort& address) const {
  std::vector<ServiceId> out;
  for (const auto& [id, service] : services_) {
    for (const auto& [rank, daemon] : service.daemons) {
      if (daemon == address) {
        out.push_back(id);
        break;
      }
    }
  }
  return out;
}

void Services::resolve_dp_rank(ServiceId id, Room room,
                               std::function<void(std::optional<std::uint32_t>)> done) {
  HttpFetch fetch;
  fetch.to = services_.at(id).bootstrap;
  fetch.method = "POST";
  fetch.target = "/query_dp_ranks";
  fetch.body = json{{"bootstrap_rooms", {room}}}.dump();
  fetch.timeout = connect_timeout(config_);
  signed_fetch(io_, config_.auth.key, std::move(fetch),
               [room, done = std::move(done)](const Result<HttpResponse>& answer) {
                 std::optional<std::uint32_t> rank;
                 const json body =
                     answer && answer->status == 200 ? json::parse(answer->body, nullptr, false) : json();
                 const auto found = body.is_object() ? body.find(std::to_string(room)) : body.end();
                 if (body.is_object() && found != body.end() && found->is_number_unsigned() &&
                     found->get<std::uint64_t>() < 65536) {
                   rank = found->get<std::uint32_t>();
                 }
                 done(rank);
               });
}

void Services::tick(std::int64_t now) {
  for (auto& [id, service] : services_) {
    if (service.state == State::kIdle && now >= service.retry_at && events_.wanted(id)) {
      connect(id);
    }
  }
  std::vector<std::pair<PeerId, Error>> lost;
  for (auto& [id, peer] : peers_) {
    auto silence = peer.link ? peer.link->silence(now) : std::nullopt;
    if (silence) {
      lost.emplace_back(id, *std::move(silence));
    } else if (peer.channel && !peer.up && now - peer.started > 4 * config_.timeouts.connect.count()) {
      lost.emplace_back(id, Error{Code::kDeadline, "its fabric did not connect in time"});
    } else if (peer.channel) {
      send_bytes(id, peer, peer.link->heartbeat());
    }
  }
  for (const auto& [id, error] : lost) {
    lose(id, error);
  }
}

std::size_t Services::connected() const {
  return static_cast<std::size_t>(
      std::count_if(peers_.begin(), peers_.end(), [](const auto& item) { return item.second.up; }));
}

std::string Services::name(PeerId id) const {
  const auto at = peers_.find(id);
  if (at == peers_.end()) {
    return fmt::format("#{}", id);
  }
  const Peer& peer = at->second;
  return peer.prefill.instance.empty()
             ? peer.address.to_string()
             : fmt::format("{} ({})", peer.prefill.instance, peer.address.to_string());
}

std::string Services::instance(PeerId peer) const {
  const auto at = peers_.find(peer);
  return at == peers_.end() ? "" : at->second.prefill.instance;
}

std::vector<Services::Row> Services::rows() const {
  std::vector<Row> out;
  for (const auto& [id, peer] : peers_) {
    out.push_back({peer.prefill.instance, peer.address.to_string(),
                   peer.fabric != nullptr ? std::string(to_string(peer.fabric->kind())) : "", peer.carries,
                   peer.up, ""});
  }
  for (const auto& [id, service] : services_) {
    if (service.error) {
      out.push_back({"", service.bootstrap.to_string(), "", "", false, service.error->message});
    }
  }
  return out;
}

}  // namespace kvferry::decode
