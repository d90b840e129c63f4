// One prefill daemon: handshake, channel, fabric, and its loss.

#include <algorithm>
#include <boost/asio/post.hpp>

#include "common/auth/sealed_token.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/http/signed_fetch.h"
#include "decode/services.h"

namespace kvferry::decode {

using log::kv;

void Services::connect_peer(const HostPort& address) {
  const PeerId id = next_peer_++;
  Peer& peer = peers_[id];
  peer.address = address;
  peer.started = steady_now();
  Descriptor self = events_.self();
  for (const auto& fabric : fabrics_) {
    const auto offer = fabric->offer(id);
    if (offer) {
      const std::string kind{to_string(fabric->kind())};
      self.fabrics.push_back(
          {kind, config_.auth.key ? seal_offer(*config_.auth.key, kind, offer->json) : offer->json});
    } else {
      KVF_LOG_WARN("fabric is not offered", kv("fabric", to_string(fabric->kind())),
                   kv("error", offer.error().message));
    }
  }
  HttpFetch fetch;
  fetch.to = address;
  fetch.method = "POST";
  fetch.target = "/v1/handshake";
  fetch.body = encode_descriptor(self);
  fetch.timeout = std::chrono::duration_cast<std::chrono::milliseconds>(config_.timeouts.connect);
  peer.pending = signed_fetch(io_, config_.auth.key, std::move(fetch),
                              [this, id](const Result<HttpResponse>& answer) { on_handshake(id, answer); });
}

void Services::on_handshake(PeerId id, const Result<HttpResponse>& answer) {
  const auto at = peers_.find(id);
  if (at == peers_.end()) {
    return;
  }
  Peer& peer = at->second;
  const std::string where = peer.address.to_string();
  if (!answer) {
    peer_failed(
        id, Error{answer.error().code, fmt::format("prefill daemon {}: {}", where, answer.error().message)},
        false, {});
    return;
  }
  auto verdict = decode_verdict(answer->body);
  if (!verdict) {
    peer_failed(id,
                Error{Code::kProtocol, fmt::format("prefill daemon {} answers the handshake with {}: {}",
                                                   where, answer->status, answer->body.substr(0, 200))},
                false, {});
    return;
  }
  if (!verdict->accepted) {
    peer_failed(id, refusal(verdict->violations), true, verdict->violations);
    return;
  }
  peer.prefill = std::move(verdict->prefill);
  peer.session = verdict->session;
  events_.on_accepted(verdict->violations);
  const std::string target = fmt::format("/v1/control?session={:016x}", verdict->session);
  HttpHeaders headers;
  if (config_.auth.key) {
    headers.push_back(sign_request(*config_.auth.key, "GET", target, "", unix_now()).header);
  }
  ChannelLimits limits;
  limits.message_bytes_max = std::uint64_t{config_.limits.pages_per_room} * 4 + (1u << 20);
  peer.pending = connect_channel(
      io_, peer.address, target, std::move(headers),
      std::chrono::duration_cast<std::chrono::milliseconds>(config_.timeouts.connect),
      [this, id](Result<std::shared_ptr<Channel>> channel) { on_channel(id, std::move(channel)); }, limits);
}

void Services::on_channel(PeerId id, Result<std::shared_ptr<Channel>> channel) {
  const auto at = peers_.find(id);
  if (at == peers_.end()) {
    return;
  }
  if (!channel) {
    peer_failed(
        id,
        Error{channel.error().code, fmt::format("prefill daemon {}: control channel: {}",
                                                at->second.address.to_string(), channel.error().message)},
        false, {});
    return;
  }
  at->second.channel = *std::move(channel);
  at->second.link.emplace(steady_now(), config_.timeouts.silence_max(),
                          link_keys(config_.auth.key.get(), at->second.session, false));
  at->second.channel->start([this, id](std::string_view bytes) { on_message(id, bytes); },
                            [this, id](const Error& error) {
                              lose(id, Error{Code::kPeerLost, "control channel: " + error.message});
                            });
  for (const message::RankUp& up : events_.announcements()) {
    send(id, up);
  }
}

void Services::on_message(PeerId id, std::string_view bytes) {
  const auto at = peers_.find(id);
  if (at == peers_.end()) {
    return;
  }
  const auto message = at->second.link->unwrap(steady_now(), bytes);
  if (!message) {
    lose(id, message.error());
  } else if (const auto* status = std::get_if<message::FabricStatus>(&*message)) {
    on_fabric_status(id, *status);
  } else {
    events_.on_control(id, *message);
  }
}

void Services::fabric_down(PeerId id, FabricKind kind) {
  const auto at = peers_.find(id);
  if (at != peers_.end() && !at->second.up) {
    at->second.ended.push_back(kind);
  }
}

void Services::on_fabric_status(PeerId id, const message::FabricStatus& status) {
  Peer& peer = peers_.at(id);
  for (const auto& fabric : fabrics_) {
    if (to_string(fabric->kind()) == status.kind) {
      peer.fabric = fabric.get();
    }
  }
  if (peer.fabric == nullptr || peer.up) {
    lose(id,
         Error{Code::kProtocol,
               fmt::format("it reports fabric '{}', which was not offered or is up already", status.kind)});
    return;
  }
  if (std::find(peer.ended.begin(), peer.ended.end(), peer.fabric->kind()) != peer.ended.end()) {
    lose(id, Error{Code::kPeerLost,
                   fmt::format("its {} connection had ended before it was reported", status.kind)});
    return;
  }
  peer.up = true;
  peer.carries = status.carries;
  KVF_LOG_INFO("prefill daemon connected", kv("peer", name(id)), kv("fabric", status.kind),
               kv("carries", status.carries));
  events_.on_up(id, *peer.fabric, status.carries);
  for (const ServiceId service : services_of(peer.address)) {
    check_ready(service);
  }
}

void Services::send(PeerId id, const ControlMessage& message) {
  const auto at = peers_.find(id);
  if (at != peers_.end() && at->second.channel) {
    send_bytes(id, at->second, at->second.link->wrap(message));
  }
}

void Services::send_bytes(PeerId id, Peer& peer, std::string bytes) {
  const auto sent = peer.channel->send(std::move(bytes));
  if (!sent && sent.error().code != Code::kUnavailable) {
    boost::asio::post(io_, [this, id, error = sent.error()] { lose(id, error); });
  }
}

void Services::broadcast(const ControlMessage& message) {
  for (const auto& [id, peer] : peers_) {
    send(id, message);
  }
}

ReceiveFabric* Services::fabric(PeerId id) {
  const auto at = peers_.find(id);
  return at == peers_.end() ? nullptr : at->second.fabric;
}

void Services::peer_failed(PeerId id, const Error& error, bool refused, std::vector<Violation> violations) {
  const HostPort address = peers_.at(id).address;
  peers_.erase(id);
  for (const auto& fabric : fabrics_) {
    fabric->fence(id);  // forgets the token of the offer
  }
  for (const ServiceId service : services_of(address)) {
    if (services_.at(service).state == State::kConnecting) {
      service_failed(service, error, refused, violations);
    }
  }
}

void Services::lose(PeerId id, const Error& error) {
  const auto at = peers_.find(id);
  if (at == peers_.end()) {
    return;
  }
  const Error named{error.code, fmt::format("prefill daemon {}: {}", name(id), error.message)};
  KVF_LOG_WARN("prefill daemon lost", kv("peer", name(id)), kv("error", error.message));
  Peer peer = std::move(at->second);
  peers_.erase(at);
  if (peer.channel) {
    peer.channel->close(error.message);
  }
  for (const auto& fabric : fabrics_) {
    fabric->fence(id);
  }
  for (const ServiceId service : services_of(peer.address)) {
    Service& entry = services_.at(service);
    if (entry.state == State::kReady || entry.state == State::kConnecting) {
      entry.state = State::kIdle;
      entry.error = named;
      entry.refused = false;
      entry.retry_at = steady_now() + 100'000'000;
      events_.on_service_unreachable(service, named);
    }
  }
  events_.on_lost(id, named);
}

}  // namespace kvferry::decode
