// How two daemons find each other, what they say, and how they lose each other: prefill/sessions and
// decode/services without HTTP.
#include "tests/sim/world.h"

namespace kvferry::sim {

namespace {
constexpr Nanos kTrip = 50 * kMicro;
}  // namespace

void World::dial(DecodeDaemon& decode, PrefillDaemon& prefill) {
  for (const auto& [peer, session] : decode.sessions) {
    if (session->prefill == &prefill) {
      return;
    }
  }
  if (!decode.dialing.insert(prefill.index).second) {
    return;
  }
  time_.after(2 * kTrip + random_delay(kTrip), [this, &decode, &prefill, mine = decode.life] {
    if (decode.life != mine) {
      return;
    }
    decode.dialing.erase(prefill.index);
    if (!prefill.alive) {
      decode.rooms->service_unreachable(kService, Error{Code::kUnavailable, "connection refused"});
      decode.retry_at = clock(decode) + kRetry;
      return;
    }
    establish(decode, prefill);
  });
}

void World::establish(DecodeDaemon& decode, PrefillDaemon& prefill) {
  // A daemon that shakes hands again has given up its earlier session.
  std::vector<std::shared_ptr<Session>> old;
  for (const auto& [peer, session] : prefill.sessions) {
    if (session->decode == &decode && session->decode_life == decode.life) {
      old.push_back(session);
    }
  }
  for (const auto& session : old) {
    lose(session, true, Error{Code::kPeerLost, "the decode daemon started a new session"});
  }
  trace_.add(30, decode.index, prefill.index);
  auto session = std::make_shared<Session>();
  session->prefill = &prefill;
  session->decode = &decode;
  session->decode_life = decode.life;
  session->at_prefill.peer = prefill.next_peer++;
  session->at_decode.peer = decode.next_peer++;
  session->at_prefill.link.emplace(clock(prefill), kSilence);
  session->at_decode.link.emplace(clock(decode), kSilence);
  session->at_prefill.open = session->at_decode.open = true;
  prefill.sessions[session->at_prefill.peer] = session;
  decode.sessions[session->at_decode.peer] = session;

  WireOptions options;
  options.reach = spec_.reach;
  options.limits.cut.payload_bytes_max = 24;
  options.limits.chunks_max = spec_.jobs_per_peer_max;
  Wire::Ends ends;
  ends.sender_peer = session->at_prefill.peer;
  ends.receiver_peer = session->at_decode.peer;
  ends.sender = [this, &prefill, life = prefill.life](FabricEvent&& event) {
    if (prefill.life == life) {
      queue_event(prefill, std::move(event));
    }
  };
  ends.receiver = [this, &decode, life = decode.life](FabricEvent&& event) {
    if (decode.life == life) {
      queue_event(decode, std::move(event));
    }
  };
  ends.place = [this](const BlockHeader& header, std::span<std::byte> bytes, bool written) {
    if (written) {
      if (flips_ > 0 && header.type == BlockType::kRows) {
        --flips_;
        bytes[bytes.size() / 2] ^= std::byte{0x10};
        flipped_.insert(header.key.grant.room);
        ++outcome_.flipped;
        if (const auto use = uses_.find(header.key.grant.room); use != uses_.end()) {
          use->second->touched = true;
        }
      }
      return;
    }
    trace_.add(40, header.key.grant.room, header.key.grant.generation, bytes.size());
    if (std::string wrong = shadow_.check(header, bytes); !wrong.empty()) {
      violation(std::move(wrong));
    }
  };
  session->wire = std::make_shared<Wire>(time_, rng_.next(), options, std::move(ends));
  wires_.push_back({session->wire, prefill.index, decode.index});
  prefill.rooms->peer_connected(session->at_prefill.peer, "decode", spec_.decode);
  for (const RankIndex rank : decode.ranks) {
    if (decode.rooms->rank_attached(rank)) {
      session->wire->add_pool(decode_engines_.at(rank).pool);
    }
  }
  for (const message::RankUp& up : decode.rooms->announcements()) {
    say(session, false, up);
  }
  time_.after(kTrip + random_delay(kTrip), [this, session] { fabric_up(session); });
}

void World::fabric_up(const std::shared_ptr<Session>& session) {
  PrefillDaemon& prefill = *session->prefill;
  if (!session->at_prefill.open) {
    return;
  }
  session->at_prefill.up = true;
  say(session, true, message::FabricStatus{"inproc", "simulated"});
  prefill::Actions actions;
  prefill.rooms->peer_ready(clock(prefill), session->at_prefill.peer, actions);
  perform(prefill, actions);
}

void World::check_service(DecodeDaemon& daemon) {
  decode::ServiceInfo info;
  info.topology = spec_.prefill;
  for (const auto& prefill : prefills_) {
    PeerId found = 0;
    for (const auto& [peer, session] : daemon.sessions) {
      found = session->prefill == prefill.get() && session->at_decode.up ? peer : found;
    }
    if (found == 0) {
      return;
    }
    for (const RankIndex rank : prefill->ranks) {
      info.peers[rank] = found;
    }
  }
  daemon.ready = true;
  decode::Actions actions;
  daemon.rooms->service_ready(clock(daemon), kService, std::move(info), actions);
  perform(daemon, actions);
}

void World::say(const std::shared_ptr<Session>& session, bool from_prefill, const ControlMessage& message) {
  End& from = from_prefill ? session->at_prefill : session->at_decode;
  transmit(session, from_prefill, from.link->wrap(message));
}

void World::transmit(const std::shared_ptr<Session>& session, bool from_prefill, std::string bytes) {
  End& from = from_prefill ? session->at_prefill : session->at_decode;
  std::vector<std::string> arriving{std::move(bytes)};
  if (!from.held.empty()) {
    arriving.push_back(std::exchange(from.held, {}));
  }
  if (from.spoil) {
    switch (*std::exchange(from.spoil, {})) {
      case FaultKind::kLoseMessage:
        arriving.erase(arriving.begin());
        break;
      case FaultKind::kRepeatMessage:
        arriving.push_back(arriving.front());
        break;
      case FaultKind::kReorderMessage:
        from.held = std::move(arriving.front());
        arriving.erase(arriving.begin());
        break;
      default:
        arriving.front().resize(arriving.front().size() / 2);
        break;
    }
  }
  for (std::string& one : arriving) {
    from.last_arrival =
        std::max({from.last_arrival, from.stalled_until, time_.now() + kTrip + random_delay(kTrip)});
    time_.at(from.last_arrival,
             [this, session, from_prefill, one = std::move(one)] { hear(session, !from_prefill, one); });
  }
}

void World::hear(const std::shared_ptr<Session>& session, bool at_prefill, const std::string& bytes) {
  End& end = at_prefill ? session->at_prefill : session->at_decode;
  if (!end.open) {
    return;
  }
  Daemon& daemon = at_prefill ? static_cast<Daemon&>(*session->prefill) : *session->decode;
  const auto message = end.link->unwrap(clock(daemon), bytes);
  trace_.add(50, at_prefill, message ? message->index() : 99, bytes.size());
  if (!message) {
    lose(session, at_prefill, message.error());
    return;
  }
  if (at_prefill) {
    prefill::Actions actions;
    session->prefill->rooms->on_message(clock(daemon), end.peer, *message, actions);
    perform(*session->prefill, actions);
    return;
  }
  DecodeDaemon& decode = *session->decode;
  decode::Actions actions;
  if (std::holds_alternative<message::FabricStatus>(*message)) {
    if (end.fabric_ended) {
      lose(session, false, Error{Code::kPeerLost, "its connection had ended before it was reported"});
      return;
    }
    end.up = true;
    decode.up.insert(end.peer);
    decode.rooms->peer_ready(clock(daemon), end.peer, spec_.reach == Reach::kPlaced, actions);
    perform(decode, actions);
    check_service(decode);
    return;
  }
  decode.rooms->on_message(clock(daemon), end.peer, *message, actions);
  perform(decode, actions);
}

void World::close_later(const std::shared_ptr<Session>& session, bool at_prefill) {
  End& from = at_prefill ? session->at_decode : session->at_prefill;
  from.last_arrival =
      std::max({from.last_arrival, from.stalled_until, time_.now() + kTrip + random_delay(kTrip)});
  time_.at(from.last_arrival, [this, session, at_prefill] {
    lose(session, at_prefill, Error{Code::kPeerLost, "the other end closed the control channel"});
  });
}

void World::lose(const std::shared_ptr<Session>& session, bool at_prefill, const Error& why) {
  End& end = at_prefill ? session->at_prefill : session->at_decode;
  if (!end.open) {
    return;
  }
  trace_.add(60, at_prefill, end.peer);
  end.open = false;
  close_later(session, !at_prefill);
  if (at_prefill) {
    PrefillDaemon& prefill = *session->prefill;
    prefill.sessions.erase(end.peer);
    session->wire->fence_by_sender(why);
    prefill::Actions actions;
    prefill.rooms->peer_lost(clock(prefill), end.peer, why, actions);
    perform(prefill, actions);
    return;
  }
  DecodeDaemon& decode = *session->decode;
  decode.sessions.erase(end.peer);
  session->wire->fence_by_receiver(why);
  decode.ready = false;
  decode.retry_at = clock(decode) + kRetry;
  decode.rooms->service_unreachable(kService, why);
  decode::Actions actions;
  decode.rooms->peer_lost(clock(decode), end.peer, why, actions);
  perform(decode, actions);
}

}  // namespace kvferry::sim
