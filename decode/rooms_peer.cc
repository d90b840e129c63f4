// Prefill services and daemons: when they are there, pages are granted; what they say about transfers.

#include <algorithm>

#include "decode/rooms.h"

namespace kvferry::decode {

void Rooms::service_ready(Nanos now, ServiceId service, ServiceInfo info, Actions& out) {
  services_[service].info = std::move(info);
  services_[service].last_error.reset();
  for (auto& [key, entry] : entries_) {
    if (entry.service == service) {
      try_grant(now, key, entry, out);
    }
  }
}

void Rooms::service_unreachable(ServiceId service, Error error) {
  services_[service].info.reset();
  services_[service].last_error = std::move(error);
}

void Rooms::service_refused(Nanos now, ServiceId service, const Error& error, Actions& out) {
  services_[service].info.reset();
  services_[service].last_error = error;
  std::vector<RoomKey> waiting;
  for (auto& [key, entry] : entries_) {
    if (entry.service == service && !entry.granted) {
      begin_end(now, entry, error, out);
      waiting.push_back(key);
    }
  }
  for (const RoomKey& key : waiting) {
    settle(now, key, out);
  }
}

bool Rooms::service_wanted(ServiceId service) const {
  return std::any_of(entries_.begin(), entries_.end(), [&](const auto& item) {
    return item.second.service == service && !item.second.granted && !item.second.failure;
  });
}

void Rooms::dp_rank_resolved(Nanos now, ServiceId service, Room room, std::optional<std::uint32_t> dp,
                             Actions& out) {
  for (auto& [key, entry] : entries_) {
    if (key.room == room && entry.service == service && entry.dp_asked && entry.dp < 0) {
      entry.dp_asked = dp.has_value();  // unknown yet: tick() asks again
      entry.dp = dp ? static_cast<int>(*dp) : -1;
      try_grant(now, key, entry, out);
    }
  }
}

void Rooms::peer_ready(Nanos now, PeerId peer, bool receiver_places, Actions& out) {
  peers_[peer] = Peer{receiver_places, false};
  for (auto& [key, entry] : entries_) {
    try_grant(now, key, entry, out);
  }
}

void Rooms::try_grant(Nanos now, const RoomKey& key, Entry& entry, Actions& out) {
  if (entry.granted || entry.failure) {
    return;
  }
  const Service& service = services_[entry.service];
  if (!service.info) {
    return;
  }
  const ServiceInfo& info = *service.info;
  if (entry.dp < 0) {
    if (info.topology.dp == 1) {
      entry.dp = 0;
    } else if (info.follow_bootstrap_room) {
      entry.dp = static_cast<int>(key.room % info.topology.dp);
    } else {
      if (!entry.dp_asked) {
        entry.dp_asked = true;
        out.push_back(ResolveDpRank{entry.service, key.room});
      }
      return;
    }
  }
  if (static_cast<std::uint32_t>(entry.dp) >= info.topology.dp) {
    begin_end(now, entry,
              Error{Code::kInvalid, fmt::format("prefill_dp_rank {} is outside the service's dp size {}",
                                                entry.dp, info.topology.dp)},
              out);
    return;
  }
  const DecodeTargets wanted = decode_targets(options_.model, info.topology, options_.topology, key.rank,
                                              static_cast<std::uint32_t>(entry.dp), key.room);
  std::map<PeerId, std::vector<RankIndex>> targets;
  for (const RankIndex rank : wanted.targets) {
    const auto peer = info.peers.find(rank);
    const auto state = peer == info.peers.end() ? peers_.end() : peers_.find(peer->second);
    if (state == peers_.end() || state->second.lost) {
      return;  // its daemon is not connected yet
    }
    targets[peer->second].push_back(rank);
  }
  entry.targets = std::move(targets);
  Grant grant;
  grant.key = entry.key;
  grant.pages = entry.pages;
  if (!entry.hybrid.window_pages.empty()) {
    grant.window_pages = std::make_shared<const std::vector<std::uint32_t>>(entry.hybrid.window_pages);
  }
  if (entry.hybrid.state_slot) {
    grant.state_slot =
        std::make_shared<const std::vector<std::uint32_t>>(std::vector{*entry.hybrid.state_slot});
  }
  grant.has_aux = entry.aux_slot >= 0;
  grant.aux_slot = static_cast<std::uint32_t>(std::max(entry.aux_slot, 0));
  for (const RankIndex rank : wanted.sources) {
    const PeerId peer = info.peers.at(rank);
    entry.sources.push_back(Source{.rank = rank, .peer = peer});
    grant.sources.emplace_back(rank, peer);
  }
  entry.granted = true;
  entry.granted_at = now;
  out.push_back(OpenGrant{std::move(grant)});
  for (const auto& [peer, ranks] : entry.targets) {
    out.push_back(
        SendMessage{peer, message::Grant{entry.key, ranks, static_cast<std::uint32_t>(entry.dp), *entry.pages,
                                         entry.prefix, entry.tokens, entry.aux_slot >= 0,
                                         static_cast<std::uint32_t>(std::max(entry.aux_slot, 0)),
                                         entry.hybrid, options_.verify}});
  }
}

void Rooms::for_rooms_of(PeerId peer, std::vector<RoomKey>& out) const {
  for (const auto& [key, entry] : entries_) {
    if (entry.targets.contains(peer)) {
      out.push_back(key);
    }
  }
}

void Rooms::peer_lost(Nanos now, PeerId peer, const Error& error, Actions& out) {
  const auto at = peers_.find(peer);
  if (at == peers_.end() || at->second.lost) {
    return;
  }
  at->second.lost = true;
  for (auto& [id, service] : services_) {
    const bool mine = service.info && std::any_of(service.info->peers.begin(), service.info->peers.end(),
                                                  [&](const auto& item) { return item.second == peer; });
    if (mine) {
      service.info.reset();
      service.last_error = error;
    }
  }
  out.push_back(FencePeer{peer, error});
  std::vector<RoomKey> touched;
  for_rooms_of(peer, touched);
  for (const RoomKey& key : touched) {
    if (const auto room = entries_.find(key); room != entries_.end()) {
      begin_end(now, room->second, error, out);
      settle(now, key, out);
    }
  }
}

void Rooms::on_message(Nanos now, PeerId peer, const ControlMessage& message, Actions& out) {
  const auto known = peers_.find(peer);
  if (known == peers_.end() || known->second.lost) {
    ++stale_messages_;
    return;
  }
  const auto* failed = std::get_if<message::TransferFailed>(&message);
  const auto* drained = std::get_if<message::TransferDrained>(&message);
  const auto* digest = std::get_if<message::TransferDigest>(&message);
  if (failed == nullptr && drained == nullptr && digest == nullptr) {
    return;
  }
  const TransferKey& transfer = failed != nullptr    ? failed->key
                                : drained != nullptr ? drained->key
                                                     : digest->key;
  const RoomKey key{transfer.grant.room, transfer.grant.decode_rank};
  const auto at = entries_.find(key);
  if (at == entries_.end() || at->second.key != transfer.grant || !at->second.targets.contains(peer)) {
    ++stale_messages_;
    return;
  }
  if (failed != nullptr) {
    begin_end(now, at->second, Error{failed->code, failed->reason}, out);
  } else if (digest != nullptr) {
    for (Source& source : at->second.sources) {
      if (source.peer == peer && source.rank == transfer.prefill_rank && !source.digest) {
        source.digest = *digest;
      }
    }
  } else {
    for (Source& source : at->second.sources) {
      source.drained = source.drained || (source.peer == peer && source.rank == transfer.prefill_rank);
    }
  }
  settle(now, key, out);
}

void Rooms::on_fabric(Nanos now, const FabricEvent& event, Actions& out) {
  if (const auto* landed = std::get_if<fabric_event::Landed>(&event)) {
    const RoomKey key{landed->key.grant.room, landed->key.grant.decode_rank};
    const auto at = entries_.find(key);
    if (at == entries_.end() || at->second.key != landed->key.grant) {
      ++stale_messages_;
      return;
    }
    for (Source& source : at->second.sources) {
      if (source.rank == landed->key.prefill_rank && source.peer == landed->peer) {
        source.landed = true;
        source.bytes = landed->bytes;
      }
    }
    settle(now, key, out);
  } else if (const auto* closed = std::get_if<fabric_event::GrantClosed>(&event)) {
    const RoomKey key{closed->key.room, closed->key.decode_rank};
    const auto at = entries_.find(key);
    if (at != entries_.end() && at->second.key == closed->key && at->second.closes_pending > 0) {
      --at->second.closes_pending;
      settle(now, key, out);
    }
  } else if (const auto* down = std::get_if<fabric_event::PeerDown>(&event)) {
    peer_lost(now, down->peer, down->error, out);
    std::vector<RoomKey> touched;
    for_rooms_of(down->peer, touched);
    for (const RoomKey& key : touched) {
      for (Source& source : entries_.at(key).sources) {
        source.drained = source.drained || source.peer == down->peer;
      }
      settle(now, key, out);
    }
    peers_.erase(down->peer);
  }
}

}  // namespace kvferry::decode
