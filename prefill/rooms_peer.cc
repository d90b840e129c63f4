// What decode daemons say: connected, grants, stops, landings, and their death.

#include <algorithm>

#include "prefill/rooms.h"

namespace kvferry::prefill {

void Rooms::peer_connected(PeerId peer, std::string instance, Topology topology) {
  Peer& entry = peers_[peer];
  entry.instance = std::move(instance);
  entry.topology = std::move(topology);
}

void Rooms::peer_ready(Nanos now, PeerId peer, Actions& out) {
  const auto at = peers_.find(peer);
  if (at == peers_.end() || at->second.lost) {
    return;
  }
  at->second.ready = true;
  std::vector<RoomKey> waiting;
  for (auto& [key, entry] : entries_) {
    pump(now, key, entry, out);
    waiting.push_back(key);
  }
  for (const RoomKey& key : waiting) {
    settle(now, key, out);
  }
}

void Rooms::peer_lost(Nanos now, PeerId peer, const Error& error, Actions& out) {
  const auto at = peers_.find(peer);
  if (at == peers_.end() || at->second.lost) {
    return;
  }
  at->second.lost = true;
  const bool was_ready = at->second.ready;
  out.push_back(FencePeer{peer, error});
  std::vector<RoomKey> touched;
  for (auto& [key, entry] : entries_) {
    for (auto& [rank, to] : entry.destinations) {
      if (to.peer == peer && !to.landed) {
        to.drained = to.drained || !was_ready;
        touched.push_back(key);
      }
    }
  }
  for (const RoomKey& key : touched) {
    if (const auto room = entries_.find(key); room != entries_.end()) {
      begin_end(now, key, room->second, error, out);
      settle(now, key, out);
    }
  }
  if (!was_ready) {
    peers_.erase(peer);
  }
}

void Rooms::on_message(Nanos now, PeerId peer, const ControlMessage& message, Actions& out) {
  const auto at = peers_.find(peer);
  if (at == peers_.end() || at->second.lost) {
    ++stale_messages_;
    return;
  }
  if (const auto* up = std::get_if<message::RankUp>(&message)) {
    std::erase_if(at->second.layouts, [&](const auto& item) { return item.first.second == up->rank; });
    at->second.ranks[up->rank] = std::make_shared<const message::RankUp>(*up);
  } else if (const auto* gone = std::get_if<message::RankGone>(&message)) {
    at->second.ranks.erase(gone->rank);
  } else if (const auto* grant = std::get_if<message::Grant>(&message)) {
    on_grant(now, peer, *grant, out);
  } else if (const auto* stop = std::get_if<message::Stop>(&message)) {
    on_stop(now, peer, *stop, out);
  } else if (const auto* landed = std::get_if<message::Landed>(&message)) {
    on_landed(now, peer, *landed, out);
  }
}

Result<void> Rooms::bind_layout(RankIndex rank, Destination& to) {
  Peer& peer = peers_.at(to.peer);
  const auto shape = peer.ranks.find(to.key.decode_rank);
  if (shape == peer.ranks.end()) {
    return fail(Code::kProtocol, "decode rank {} granted pages but its pool is not announced",
                to.key.decode_rank);
  }
  auto& cached = peer.layouts[{rank, to.key.decode_rank}];
  if (!cached) {
    const auto local = ranks_.find(rank);
    if (local == ranks_.end()) {
      return fail(Code::kUnavailable, "prefill rank {} has no engine attached", rank);
    }
    const RankShape src{options_.topology, options_.topology.coord(rank), local->second.pool->page_size(),
                        shapes(local->second.pool->layout())};
    const RankShape dst{peer.topology, peer.topology.coord(to.key.decode_rank), shape->second->page_size,
                        shape->second->buffers};
    KVF_TRY(std::vector<PairLayout> layouts, pair_layouts(options_.model, src, dst));
    cached = std::make_shared<const std::vector<PairLayout>>(std::move(layouts));
  }
  to.layouts = cached;
  to.remote = shape->second;
  return {};
}

Result<void> Rooms::add_destination(Nanos now, PeerId peer, const message::Grant& grant, RankIndex rank) {
  const Peer& from = peers_.at(peer);
  const RoomKey key{grant.key.room, rank};
  if (rank >= options_.topology.rank_count() || grant.key.decode_rank >= from.topology.rank_count() ||
      grant.prefill_dp >= options_.topology.dp) {
    return fail(Code::kProtocol,
                "grant names prefill rank {}, dp {} and decode rank {}; the topologies have {}, {} and {}",
                rank, grant.prefill_dp, grant.key.decode_rank, options_.topology.rank_count(),
                options_.topology.dp, from.topology.rank_count());
  }
  if (const auto tomb = tombstones_.find(key); tomb != tombstones_.end()) {
    // Who takes no part in a use that ended is told why, once; what it grants after that is for a new use.
    Tombstone& ended = tomb->second;
    const bool heard = std::any_of(ended.heard.begin(), ended.heard.end(), [&](const GrantKey& other) {
      return other.decode_rank == grant.key.decode_rank;
    });
    if (ended.error && !heard) {
      ended.heard.push_back(grant.key);
      return fail(*ended.error);
    }
  }
  auto at = entries_.find(key);
  if (at == entries_.end()) {
    if (entries_.size() >= options_.rooms_max) {
      return fail(Code::kExhausted, "prefill has {} rooms alive, limits.rooms is {}; try again later",
                  entries_.size(), options_.rooms_max);
    }
    at = entries_.try_emplace(key).first;
    at->second.created = now;
    at->second.instance = from.instance;
  }
  Entry& entry = at->second;
  if (entry.failure) {
    entry.refused.push_back(grant.key);
    return fail(*entry.failure);
  }
  if (entry.destinations.empty()) {
    entry.instance = from.instance;
  }
  if (entry.instance != from.instance || entry.destinations.contains(grant.key.decode_rank)) {
    return fail(Code::kConflict, "room {} is alive already: decode service '{}' has granted pages for it",
                key.room, entry.instance);
  }
  const DecodeTargets targets = decode_targets(options_.model, options_.topology, from.topology,
                                               grant.key.decode_rank, grant.prefill_dp, grant.key.room);
  Destination to;
  to.peer = peer;
  to.key = grant.key;
  to.pages = std::make_shared<const std::vector<std::uint32_t>>(grant.pages);
  to.prefix = grant.prefix;
  to.tokens = grant.tokens;
  to.has_aux = grant.has_aux;
  to.aux_slot = grant.aux_slot;
  to.hybrid = grant.hybrid;
  to.verify = grant.verify;
  to.sends = std::find(targets.sources.begin(), targets.sources.end(), rank) != targets.sources.end();
  to.sends_aux = targets.aux_source == rank;
  to.granted = now;
  entry.destinations.emplace(grant.key.decode_rank, std::move(to));
  if (!entry.expected) {
    entry.expected = prefill_destinations(options_.model, options_.topology, from.topology, rank,
                                          from.topology.coord(grant.key.decode_rank).dp);
  }
  entry.progress = now;
  return {};
}

void Rooms::on_grant(Nanos now, PeerId peer, const message::Grant& grant, Actions& out) {
  for (const RankIndex rank : grant.targets) {
    const RoomKey key{grant.key.room, rank};
    const auto added = add_destination(now, peer, grant, rank);
    if (!added) {
      out.push_back(SendMessage{
          peer, message::TransferFailed{{grant.key, rank}, added.error().code, added.error().message}});
      if (const auto at = entries_.find(key);
          at != entries_.end() && at->second.engine == 0 && at->second.destinations.empty()) {
        entries_.erase(at);
      }
      continue;
    }
    const auto at = entries_.find(key);
    pump(now, key, at->second, out);
    settle(now, key, out);
  }
}

void Rooms::on_stop(Nanos now, PeerId peer, const message::Stop& stop, Actions& out) {
  for (const RankIndex rank : stop.targets) {
    const RoomKey key{stop.key.room, rank};
    const auto at = entries_.find(key);
    const auto to = at == entries_.end() ? decltype(at->second.destinations.begin()){}
                                         : at->second.destinations.find(stop.key.decode_rank);
    if (at == entries_.end() || to == at->second.destinations.end() || to->second.key != stop.key) {
      // Never heard of it, or it ended here already: then nothing of it can land.
      const auto tomb = tombstones_.find(key);
      const bool heard = tomb != tombstones_.end() &&
                         std::find(tomb->second.heard.begin(), tomb->second.heard.end(), stop.key) !=
                             tomb->second.heard.end();
      if (at == entries_.end() && !heard) {
        bury(key, Tombstone{.error = Error{stop.code, stop.reason},
                            .heard = {stop.key},
                            .expires = now + options_.bootstrap.count()});
      }
      out.push_back(SendMessage{peer, message::TransferDrained{{stop.key, rank}}});
      continue;
    }
    if (to->second.drained) {
      out.push_back(SendMessage{peer, message::TransferDrained{{stop.key, rank}}});
    }
    begin_end(now, key, at->second, Error{stop.code, stop.reason}, out);
    settle(now, key, out);
  }
}

void Rooms::on_landed(Nanos now, PeerId peer, const message::Landed& landed, Actions& out) {
  bool known = false;
  const auto begin = entries_.lower_bound(RoomKey{landed.key.room, 0});
  std::vector<RoomKey> touched;
  for (auto at = begin; at != entries_.end() && at->first.room == landed.key.room; ++at) {
    const auto to = at->second.destinations.find(landed.key.decode_rank);
    if (to != at->second.destinations.end() && to->second.key == landed.key && to->second.peer == peer) {
      to->second.landed = true;
      at->second.progress = now;
      known = true;
      touched.push_back(at->first);
    }
  }
  stale_messages_ += known ? 0 : 1;
  for (const RoomKey& key : touched) {
    settle(now, key, out);
  }
}

}  // namespace kvferry::prefill
