#include "prefill/sessions.h"

#include <boost/asio/post.hpp>
#include <charconv>

#include "common/auth/sealed_token.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/random.h"

namespace kvferry::prefill {

using log::kv;

Sessions::Sessions(boost::asio::io_context& io, const DaemonConfig& config,
                   const std::vector<std::unique_ptr<SendFabric>>& fabrics, SessionEvents& events)
    : io_(io), config_(config), fabrics_(fabrics), events_(events) {}

HttpResponse Sessions::handshake(const HttpRequest& request, const Descriptor& self) {
  auto decode = decode_descriptor(request.body);
  if (!decode) {
    return http_error(400, decode.error().message);
  }
  Verdict verdict = judge(self, *decode, random_u64() | 1);
  events_.on_verdict(verdict);
  if (verdict.accepted) {
    drop_epoch(decode->epoch);
    if (sessions_.size() >= config_.limits.peers) {
      return http_error(429, fmt::format("{} decode daemons are connected, limits.peers is {}",
                                         sessions_.size(), config_.limits.peers));
    }
    Session session;
    session.token = verdict.session;
    session.created = steady_now();
    // The verdict names the best fabric; the others the two have in common are tried when it does not
    // connect.
    for (const auto& fabric : fabrics_) {
      for (const FabricDescription& offered : decode->fabrics) {
        const bool local = fabric->kind() != FabricKind::kShm || decode->host_id == self.host_id;
        if (offered.kind != to_string(fabric->kind()) || !local) {
          continue;
        }
        auto offer = open_offer(config_.auth.key.get(), offered.kind, offered.data);
        if (!offer) {
          return http_error(401, offer.error().message);
        }
        session.candidates.emplace_back(fabric.get(), FabricOffer{fabric->kind(), *std::move(offer)});
      }
    }
    session.decode = *std::move(decode);
    sessions_.emplace(next_peer_++, std::move(session));
  }
  HttpResponse response;
  response.status = verdict.accepted ? 200 : 422;
  response.body = encode_verdict(verdict);
  return response;
}

// A daemon that shakes hands again has given up its earlier session.
void Sessions::drop_epoch(Epoch epoch) {
  std::vector<PeerId> old;
  for (const auto& [peer, session] : sessions_) {
    if (session.decode.epoch == epoch) {
      old.push_back(peer);
    }
  }
  for (const PeerId peer : old) {
    lose(peer, Error{Code::kPeerLost, "the decode daemon started a new session"});
  }
}

PeerId Sessions::find_token(const HttpRequest& request) const {
  const auto field = request.query.find("session");
  std::uint64_t token = 0;
  if (field == request.query.end()) {
    return 0;
  }
  const std::string& text = field->second;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), token, 16);
  if (error != std::errc{} || end != text.data() + text.size()) {
    return 0;
  }
  for (const auto& [peer, session] : sessions_) {
    if (session.token == token && !session.channel) {
      return peer;
    }
  }
  return 0;
}

std::optional<HttpResponse> Sessions::admit(const HttpRequest& request) {
  if (find_token(request) == 0) {
    return http_error(401, "no handshake is waiting for this session; POST /v1/handshake first");
  }
  return std::nullopt;
}

void Sessions::accepted(const HttpRequest& request, std::shared_ptr<Channel> channel) {
  const PeerId peer = find_token(request);
  if (peer == 0) {
    channel->close("session expired");
    return;
  }
  Session& session = sessions_.at(peer);
  session.channel = std::move(channel);
  session.link.emplace(steady_now(), config_.timeouts.silence_max(),
                       link_keys(config_.auth.key.get(), session.token, true));
  KVF_LOG_INFO("decode daemon connected", kv("peer", name(peer)));
  events_.on_connected(peer, session.decode);
  session.channel->start(
      [this, peer](std::string_view bytes) {
        const auto at = sessions_.find(peer);
        if (at == sessions_.end()) {
          return;
        }
        const auto message = at->second.link->unwrap(steady_now(), bytes);
        if (!message) {
          lose(peer, message.error());
          return;
        }
        events_.on_control(peer, *message);
      },
      [this, peer](const Error& error) {
        lose(peer, Error{Code::kPeerLost, "control channel: " + error.message});
      });
  boost::asio::post(io_, [this, peer] { next_candidate(peer); });
}

void Sessions::next_candidate(PeerId peer) {
  const auto at = sessions_.find(peer);
  if (at == sessions_.end()) {
    return;
  }
  Session& session = at->second;
  if (session.candidate >= session.candidates.size()) {
    lose(peer, Error{Code::kUnavailable, "no fabric connects:" + session.problems});
    return;
  }
  const auto& [fabric, offer] = session.candidates[session.candidate];
  fabric->connect(peer, offer);
}

bool Sessions::connecting(PeerId peer) const {
  const auto at = sessions_.find(peer);
  return at != sessions_.end() && !at->second.up;
}

void Sessions::on_fabric_up(PeerId peer, FabricKind kind, const std::string& carries) {
  const auto at = sessions_.find(peer);
  if (at == sessions_.end() || at->second.up || fabric(peer) == nullptr || fabric(peer)->kind() != kind) {
    return;
  }
  at->second.up = true;
  at->second.carries = carries;
  const std::string name_of_kind{to_string(kind)};
  KVF_LOG_INFO("fabric connected", kv("peer", name(peer)), kv("fabric", name_of_kind),
               kv("carries", carries));
  send(peer, message::FabricStatus{name_of_kind, carries});
  events_.on_up(peer, name_of_kind, carries);
}

void Sessions::on_candidate_down(PeerId peer, FabricKind kind, const Error& error) {
  if (fabric(peer) == nullptr || fabric(peer)->kind() != kind) {
    return;
  }
  Session& session = sessions_.at(peer);
  KVF_LOG_WARN("fabric does not connect", kv("peer", name(peer)), kv("fabric", to_string(kind)),
               kv("error", error.message));
  session.problems += fmt::format(" {}: {};", to_string(kind), error.message);
  ++session.candidate;
  next_candidate(peer);
}

void Sessions::send(PeerId peer, const ControlMessage& message) {
  const auto at = sessions_.find(peer);
  if (at != sessions_.end() && at->second.channel) {
    send_bytes(peer, at->second, at->second.link->wrap(message));
  }
}

void Sessions::send_bytes(PeerId peer, Session& session, std::string bytes) {
  const auto sent = session.channel->send(std::move(bytes));
  if (!sent && sent.error().code != Code::kUnavailable) {
    // A peer that does not read its control messages cannot be served; nothing may be dropped silently.
    boost::asio::post(io_, [this, peer, error = sent.error()] { lose(peer, error); });
  }
}

void Sessions::lose(PeerId peer, const Error& error) {
  const auto at = sessions_.find(peer);
  if (at == sessions_.end()) {
    return;
  }
  const Error named{error.code, fmt::format("decode daemon {}: {}", name(peer), error.message)};
  KVF_LOG_WARN("decode daemon lost", kv("peer", name(peer)), kv("error", error.message));
  Session session = std::move(at->second);
  sessions_.erase(at);
  if (session.channel) {
    session.channel->close(error.message);
  }
  if (session.candidate < session.candidates.size() && session.channel) {
    session.candidates[session.candidate].first->fence(peer);
  }
  events_.on_lost(peer, named);
}

SendFabric* Sessions::fabric(PeerId peer) {
  const auto at = sessions_.find(peer);
  if (at == sessions_.end() || at->second.candidate >= at->second.candidates.size()) {
    return nullptr;
  }
  return at->second.candidates[at->second.candidate].first;
}

void Sessions::tick(std::int64_t now) {
  std::vector<std::pair<PeerId, Error>> lost;
  for (auto& [peer, session] : sessions_) {
    if (!session.channel) {
      if (now - session.created > config_.timeouts.connect.count()) {
        lost.emplace_back(peer, Error{Code::kDeadline, "no control channel followed the handshake"});
      }
    } else if (auto silence = session.link->silence(now)) {
      lost.emplace_back(peer, *std::move(silence));
    } else {
      send_bytes(peer, session, session.link->heartbeat());
    }
  }
  for (const auto& [peer, error] : lost) {
    lose(peer, error);
  }
}

std::string Sessions::name(PeerId peer) const {
  const auto at = sessions_.find(peer);
  if (at == sessions_.end()) {
    return fmt::format("#{}", peer);
  }
  const Session& session = at->second;
  return session.channel ? fmt::format("{} ({})", session.decode.instance, session.channel->remote())
                         : session.decode.instance;
}

std::string Sessions::instance(PeerId peer) const {
  const auto at = sessions_.find(peer);
  return at == sessions_.end() ? "" : at->second.decode.instance;
}

std::vector<Sessions::Row> Sessions::rows() const {
  std::vector<Row> out;
  for (const auto& [peer, session] : sessions_) {
    const bool has = session.candidate < session.candidates.size();
    out.push_back({peer, session.decode.instance, session.channel ? session.channel->remote() : "",
                   has ? std::string(to_string(session.candidates[session.candidate].first->kind())) : "",
                   session.carries, session.up});
  }
  return out;
}

}  // namespace kvferry::prefill
