// The daemons around the room machines: what prefill/daemon.cc and decode/daemon.cc do, without sockets.
#include "tests/sim/world.h"

namespace kvferry::sim {

namespace {
constexpr Nanos kHandOver = 5 * kMicro;  // from a fabric's thread to the daemon's
}  // namespace

void World::boot(PrefillDaemon& daemon) {
  prefill::RoomsOptions options;
  options.model = spec_.model;
  options.topology = spec_.prefill;
  options.bootstrap = kBootstrap;
  options.transfer = kTransfer;
  options.drain = kDrain;
  options.jobs_per_peer_max = spec_.jobs_per_peer_max;
  daemon.rooms = std::make_unique<prefill::Rooms>(std::move(options));
  daemon.alive = true;
  tick(daemon);
}

void World::boot(DecodeDaemon& daemon) {
  decode::RoomsOptions options;
  options.model = spec_.model;
  options.topology = spec_.decode;
  options.bootstrap = kBootstrap;
  options.transfer = kTransfer;
  options.drain = kDrain;
  options.verify = spec_.verify;
  options.first_generation = (rng_.next() >> 1) | 1;
  daemon.rooms = std::make_unique<decode::Rooms>(std::move(options));
  daemon.alive = true;
  daemon.ready = false;
  daemon.dialing.clear();
  daemon.up.clear();
  tick(daemon);
}

void World::crash(Daemon& daemon, Nanos down) {
  if (!daemon.alive) {
    return;
  }
  trace_.add(10, daemon.prefill, daemon.index);
  daemon.alive = false;
  ++daemon.life;
  daemon.events.clear();
  for (auto& [peer, session] : std::exchange(daemon.sessions, {})) {
    (daemon.prefill ? session->at_prefill : session->at_decode).open = false;
    close_later(session, !daemon.prefill);
  }
  for (const Cable& cable : wires_) {  // also those it had given up already
    if (daemon.prefill && cable.prefill == daemon.index) {
      cable.wire->sender_died();
    } else if (!daemon.prefill && cable.decode == daemon.index) {
      cable.wire->receiver_died();
    }
  }
  if (daemon.prefill) {
    outcome_.stale += static_cast<PrefillDaemon&>(daemon).rooms->stats().stale_messages;
    static_cast<PrefillDaemon&>(daemon).rooms.reset();
  } else {
    outcome_.stale += static_cast<DecodeDaemon&>(daemon).rooms->stats().stale_messages;
    static_cast<DecodeDaemon&>(daemon).rooms.reset();
  }
  for (const RankIndex rank : daemon.ranks) {
    lost_daemon((daemon.prefill ? prefill_engines_ : decode_engines_).at(rank));
  }
  time_.after(down, [this, &daemon] {
    daemon.prefill ? boot(static_cast<PrefillDaemon&>(daemon)) : boot(static_cast<DecodeDaemon&>(daemon));
  });
}

void World::tick(Daemon& daemon) {
  time_.after(kHeartbeat, [this, &daemon, life = daemon.life] {
    if (daemon.life == life) {
      tick(daemon);
    }
  });
  std::vector<std::pair<std::shared_ptr<Session>, Error>> lost;
  for (const auto& [peer, session] : daemon.sessions) {
    End& end = daemon.prefill ? session->at_prefill : session->at_decode;
    if (auto silence = end.link->silence(clock(daemon))) {
      lost.emplace_back(session, *silence);
    } else {
      transmit(session, daemon.prefill, end.link->heartbeat());
    }
  }
  for (const auto& [session, error] : lost) {
    lose(session, daemon.prefill, error);
  }
  if (daemon.prefill) {
    auto& self = static_cast<PrefillDaemon&>(daemon);
    prefill::Actions actions;
    self.rooms->tick(clock(daemon), actions);
    perform(self, actions);
    return;
  }
  auto& self = static_cast<DecodeDaemon&>(daemon);
  if (!self.ready && self.rooms->service_wanted(kService) && clock(daemon) >= self.retry_at) {
    for (const auto& prefill : prefills_) {
      dial(self, *prefill);
    }
  }
  decode::Actions actions;
  self.rooms->tick(clock(daemon), actions);
  perform(self, actions);
}

void World::queue_event(Daemon& daemon, FabricEvent&& event) {
  if (!daemon.alive) {
    return;
  }
  daemon.events.push_back(std::move(event));
  time_.after(kHandOver, [this, &daemon, life = daemon.life] {
    if (daemon.life != life) {
      return;
    }
    const FabricEvent next = std::move(daemon.events.front());
    daemon.events.pop_front();
    trace_.add(20 + next.index(), daemon.prefill, daemon.index);
    daemon.prefill ? on_fabric(static_cast<PrefillDaemon&>(daemon), next)
                   : on_fabric(static_cast<DecodeDaemon&>(daemon), next);
  });
}

void World::on_fabric(PrefillDaemon& daemon, const FabricEvent& event) {
  if (const auto* down = std::get_if<fabric_event::PeerDown>(&event)) {
    const auto at = daemon.sessions.find(down->peer);
    if (at != daemon.sessions.end() && !at->second->at_prefill.up) {
      lose(at->second, true, down->error);
      return;
    }
  }
  if (const auto* done = std::get_if<fabric_event::ChunkDone>(&event)) {
    outcome_.bytes += done->bytes;
  }
  if (const auto* failed = std::get_if<fabric_event::ChunkFailed>(&event);
      failed != nullptr && failed->error.code == Code::kExhausted) {
    violation("a full send queue was taken for a failure: " + failed->error.message);
  }
  prefill::Actions actions;
  daemon.rooms->on_fabric(clock(daemon), event, actions);
  perform(daemon, actions);
}

void World::on_fabric(DecodeDaemon& daemon, const FabricEvent& event) {
  const auto* down = std::get_if<fabric_event::PeerDown>(&event);
  if (std::holds_alternative<fabric_event::Rejected>(event)) {
    return;
  }
  if (down != nullptr && daemon.up.erase(down->peer) == 0) {
    if (const auto at = daemon.sessions.find(down->peer); at != daemon.sessions.end()) {
      at->second->at_decode.fabric_ended = true;
    }
    return;
  }
  decode::Actions actions;
  daemon.rooms->on_fabric(clock(daemon), event, actions);
  perform(daemon, actions);
}

std::shared_ptr<World::Session> World::session_of(const Daemon& daemon, PeerId peer) {
  const auto at = daemon.sessions.find(peer);
  return at == daemon.sessions.end() ? nullptr : at->second;
}

void World::perform(PrefillDaemon& daemon, prefill::Actions& actions) {
  for (prefill::Action& action : actions) {
    if (auto* post = std::get_if<prefill::PostChunk>(&action)) {
      if (const auto to = session_of(daemon, post->peer)) {
        to->wire->post(std::move(post->job));
      }
    } else if (const auto* digest = std::get_if<prefill::DigestChunk>(&action)) {
      // The rows are read some time later: until then they must not go back.
      time_.after(random_delay(kMilli), [this, &daemon, life = daemon.life, work = *digest] {
        if (daemon.life == life) {
          prefill::Actions more;
          daemon.rooms->digest_done(clock(daemon), work.key, work.chunk, compute_digest(*work.task), more);
          perform(daemon, more);
        }
      });
    } else if (const auto* cancel = std::get_if<prefill::CancelTransfer>(&action)) {
      if (const auto to = session_of(daemon, cancel->peer)) {
        to->wire->cancel(cancel->key);
      }
    } else if (const auto* fence = std::get_if<prefill::FencePeer>(&action)) {
      if (const auto to = session_of(daemon, fence->peer)) {
        lose(to, true, fence->reason);
      }
    } else if (const auto* message = std::get_if<prefill::SendMessage>(&action)) {
      if (const auto to = session_of(daemon, message->peer)) {
        say(to, true, message->message);
      }
    } else if (const auto* event = std::get_if<prefill::TellEngine>(&action)) {
      tell(true, event->engine, event->event);
    }
  }
}

void World::perform(DecodeDaemon& daemon, decode::Actions& actions) {
  for (decode::Action& action : actions) {
    if (auto* open = std::get_if<decode::OpenGrant>(&action)) {
      const Grant& grant = open->grant;
      const Engine& engine = decode_engines_.at(grant.key.decode_rank);
      if (const auto held = engine.held.find(grant.key.room); held != engine.held.end()) {
        held->second.use->granted.insert(grant.key.decode_rank);
      }
      shadow_.grant(*engine.pool, *grant.pages, grant.has_aux ? static_cast<int>(grant.aux_slot) : -1,
                    grant.key);
      std::set<PeerId> peers;
      for (const auto& [rank, peer] : grant.sources) {
        peers.insert(peer);
      }
      for (const PeerId peer : peers) {
        if (const auto from = session_of(daemon, peer)) {
          from->wire->open(grant);
        }
      }
    } else if (const auto* verify = std::get_if<decode::VerifyRoom>(&action)) {
      time_.after(random_delay(kMilli), [this, &daemon, life = daemon.life, work = *verify] {
        if (daemon.life == life) {
          decode::Actions more;
          daemon.rooms->digest_done(clock(daemon), work.key, compute_digest(*work.task), more);
          perform(daemon, more);
        }
      });
    } else if (const auto* close = std::get_if<decode::CloseGrant>(&action)) {
      for (const PeerId peer : close->peers) {
        if (const auto from = session_of(daemon, peer)) {
          from->wire->close(close->key);
        } else {
          queue_event(daemon, fabric_event::GrantClosed{close->key});
        }
      }
    } else if (const auto* fence = std::get_if<decode::FencePeer>(&action)) {
      if (const auto from = session_of(daemon, fence->peer)) {
        lose(from, false, fence->reason);
      }
    } else if (const auto* message = std::get_if<decode::SendMessage>(&action)) {
      if (const auto to = session_of(daemon, message->peer)) {
        say(to, false, message->message);
      }
    } else if (const auto* event = std::get_if<decode::TellEngine>(&action)) {
      tell(false, event->engine, event->event);
    } else if (const auto* release = std::get_if<decode::ReleasePool>(&action)) {
      for (const auto& [peer, from] : daemon.sessions) {
        from->wire->remove_pool(release->rank);
        say(from, false, message::RankGone{release->rank});
      }
    }
  }
}

void World::tell(bool prefill_side, EngineId id, EngineEvent event) {
  for (auto& [rank, engine] : prefill_side ? prefill_engines_ : decode_engines_) {
    if (engine.id != id || !engine.alive) {
      continue;
    }
    engine.last_event = std::max(engine.last_event, time_.now() + random_delay(50 * kMicro));
    time_.at(engine.last_event, [this, &to = engine, life = engine.life, id, event = std::move(event)] {
      if (to.life == life && to.id == id) {
        deliver(to, event);
      }
    });
    return;
  }
}

}  // namespace kvferry::sim
