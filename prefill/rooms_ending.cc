// How a room ends: landed, or stopped, drained and reported. Also deadlines.

#include <algorithm>

#include "prefill/rooms.h"

namespace kvferry::prefill {

void Rooms::begin_end(Nanos now, const RoomKey& key, Entry& entry, Error error, Actions& out) {
  if (entry.failure) {
    return;  // the first reason wins
  }
  entry.failure = std::move(error);
  for (auto& [rank, to] : entry.destinations) {
    const TransferKey transfer{to.key, key.rank};
    const auto peer = peers_.find(to.peer);
    const bool reachable = peer != peers_.end() && !peer->second.lost;
    if (reachable && !to.landed) {
      out.push_back(SendMessage{
          to.peer, message::TransferFailed{transfer, entry.failure->code, entry.failure->message}});
    }
    if (to.landed || !to.posted_any) {
      to.drained = true;
      if (reachable && !to.landed) {
        out.push_back(SendMessage{to.peer, message::TransferDrained{transfer}});
      }
    } else if (reachable && !to.drained) {
      to.cancel_at = now;
      out.push_back(CancelTransfer{to.peer, transfer});
    }
  }
}

// Ends the entry if nothing is left to wait for.
void Rooms::settle(Nanos now, const RoomKey& key, Actions& out) {
  const auto at = entries_.find(key);
  if (at == entries_.end()) {
    return;
  }
  const Entry& entry = at->second;
  if (entry.failure) {
    const bool drained = std::all_of(entry.destinations.begin(), entry.destinations.end(),
                                     [](const auto& item) { return item.second.drained; });
    if (drained) {
      finish(now, at, out);
    }
    return;
  }
  const bool landed = entry.last_seen && complete(entry) &&
                      std::all_of(entry.destinations.begin(), entry.destinations.end(), [](const auto& item) {
                        return item.second.landed && item.second.in_flight == 0;
                      });
  if (landed) {
    finish(now, at, out);
  }
}

void Rooms::report(const Entry& entry, const Destination& to, Nanos now, Actions& out) const {
  TransferReport report = to.report;
  report.peer = to.peer;
  report.total_ns = now - std::max(to.granted, entry.created);
  if (to.first_post != 0) {
    report.post_ns = to.last_done - to.first_post;
    report.land_ns = std::max<Nanos>(0, now - to.last_done);
  }
  if (entry.failure && !to.landed) {
    report.state = entry.failure->code == Code::kAborted ? TransferState::kAborted : TransferState::kFailed;
    report.error = *entry.failure;
  } else {
    report.state = TransferState::kLanded;
  }
  out.push_back(std::move(report));
}

void Rooms::finish(Nanos now, Entries::iterator at, Actions& out) {
  const RoomKey key = at->first;
  Entry& entry = at->second;
  EngineEvent event{.type = EngineEventType::kLanded, .room = key.room, .tokens = entry.next_token};
  Nanos first = 0;
  for (auto& [rank, to] : entry.destinations) {
    to.report.key = TransferKey{to.key, key.rank};
    event.bytes += to.report.bytes;
    first = to.first_post != 0 && (first == 0 || to.first_post < first) ? to.first_post : first;
    if (to.sends) {
      report(entry, to, now, out);
    }
  }
  event.transfer_ns = first == 0 ? 0 : static_cast<std::uint64_t>(std::max<Nanos>(0, now - first));
  if (entry.failure) {
    event.type = entry.failure->code == Code::kAborted ? EngineEventType::kAborted : EngineEventType::kFailed;
    event.code = entry.failure->code;
    event.reason = entry.failure->message;
  }
  if (entry.engine != 0) {
    out.push_back(TellEngine{entry.engine, std::move(event)});
  }
  Tombstone tombstone{.error = entry.failure,
                      .engine_heard = !entry.chunks.empty(),
                      .heard = std::move(entry.refused),
                      .expires = now + options_.bootstrap.count()};
  for (const auto& [rank, to] : entry.destinations) {
    tombstone.heard.push_back(to.key);
  }
  bury(key, std::move(tombstone));
  entries_.erase(at);
}

// Remembers why a room ended before this side, or its engine, heard of it. Bounded; the oldest go first.
void Rooms::bury(const RoomKey& key, Tombstone tombstone) {
  const auto [at, fresh] = tombstones_.insert_or_assign(key, std::move(tombstone));
  if (fresh) {
    tombstone_order_.push_back(key);
  }
  while (tombstone_order_.size() > options_.rooms_max) {
    tombstones_.erase(tombstone_order_.front());
    tombstone_order_.pop_front();
  }
}

void Rooms::tick(Nanos now, Actions& out) {
  std::vector<RoomKey> late;
  for (auto& [key, entry] : entries_) {
    const bool waiting = entry.engine == 0 || !complete(entry);
    const Nanos deadline =
        waiting ? entry.created + options_.bootstrap.count() : entry.progress + options_.transfer.count();
    if (!entry.failure && now >= deadline) {
      late.push_back(key);
    }
    for (auto& [rank, to] : entry.destinations) {
      if (to.cancel_at != 0 && !to.drained && now >= to.cancel_at + options_.drain.count()) {
        to.cancel_at = now;
        out.push_back(FencePeer{
            to.peer,
            Error{Code::kDeadline,
                  fmt::format("fenced: room {} (prefill rank {}) did not drain within {} s, {} bytes of it "
                              "were sent; {} pages wait",
                              key.room, key.rank, options_.drain.count() / 1'000'000'000, to.report.bytes,
                              entry.page_count)}});
      }
    }
  }
  for (const RoomKey& key : late) {
    Entry& entry = entries_.at(key);
    std::string what = "no progress";
    if (entry.engine == 0) {
      what = "the prefill engine never sent this room";
    } else if (!complete(entry)) {
      what = fmt::format("only {} of {} decode ranks granted pages", entry.destinations.size(),
                         entry.expected ? std::to_string(entry.expected->size()) : "an unknown number");
    }
    begin_end(now, key, entry,
              Error{Code::kDeadline, fmt::format("room {}: {} within the deadline", key.room, what)}, out);
    settle(now, key, out);
  }
  while (!tombstone_order_.empty()) {
    const auto at = tombstones_.find(tombstone_order_.front());
    if (at != tombstones_.end() && at->second.expires > now) {
      break;
    }
    if (at != tombstones_.end()) {
      tombstones_.erase(at);
    }
    tombstone_order_.pop_front();
  }
}

Rooms::Stats Rooms::stats() const {
  Stats out;
  out.stale_messages = stale_messages_;
  for (const auto& [key, entry] : entries_) {
    ++out.rooms;
    out.waiting += entry.engine == 0 || !complete(entry) ? 1 : 0;
    (entry.failure ? out.quarantined_pages : out.live_pages) += entry.page_count;
  }
  return out;
}

}  // namespace kvferry::prefill
