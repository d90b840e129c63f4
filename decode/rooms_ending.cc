// How a room ends on the decode side: landed, or stopped, closed, drained and reported. Also deadlines.

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

#include "common/base/clean_text.h"
#include "decode/rooms.h"

namespace kvferry::decode {

void Rooms::tell(const RoomKey& key, Entry& entry, EngineEvent event, Actions& out) {
  if (entry.engine != 0 && !entry.told) {
    event.room = key.room;
    out.push_back(TellEngine{entry.engine, std::move(event)});
  }
}

// The metadata row must be the one of this room: a row of another request would be used as its first token.
Result<void> Rooms::check_aux(const RoomKey& key, const Entry& entry) const {
  const Pool& pool = *ranks_.at(key.rank).pool;
  const auto& fields = pool.layout().aux;
  for (std::uint32_t index = 0; entry.aux_slot >= 0 && index < fields.size(); ++index) {
    if (fields[index].name != kAuxRoomField || fields[index].width < sizeof(Room)) {
      continue;
    }
    Room written = 0;
    std::memcpy(&written, pool.aux_row(index, static_cast<std::uint32_t>(entry.aux_slot)).data(),
                sizeof written);
    if (written != key.room) {
      return fail(Code::kCorrupt,
                  "context corruption: aux slot {} holds the metadata of room {}, expected room {}",
                  entry.aux_slot, written, key.room);
    }
  }
  return {};
}

void Rooms::begin_end(Nanos now, Entry& entry, Error error, Actions& out) {
  if (entry.failure) {
    return;  // the first reason wins
  }
  entry.failure = std::move(error);
  entry.ending_at = now;
  if (!entry.granted) {
    return;
  }
  std::set<PeerId> with_source;
  for (const Source& source : entry.sources) {
    with_source.insert(source.peer);
  }
  for (const auto& [peer, ranks] : entry.targets) {
    const auto state = peers_.find(peer);
    if (state != peers_.end() && !state->second.lost) {
      out.push_back(
          SendMessage{peer, message::Stop{entry.key, ranks, entry.failure->code, entry.failure->message}});
    }
  }
  CloseGrant close{entry.key, {with_source.begin(), with_source.end()}};
  entry.closes_pending = static_cast<std::uint32_t>(close.peers.size());
  out.push_back(std::move(close));
}

// Nothing of this source can land any more (given that the grant is closed on its fabric).
bool Rooms::source_quiet(const Source& source) const {
  const auto peer = peers_.find(source.peer);
  const bool places = peer != peers_.end() && peer->second.receiver_places;
  return source.landed || source.drained || places;
}

void Rooms::settle(Nanos now, const RoomKey& key, Actions& out) {
  const auto at = entries_.find(key);
  if (at == entries_.end()) {
    return;
  }
  Entry& entry = at->second;
  const auto all = [&](auto&& test) { return std::all_of(entry.sources.begin(), entry.sources.end(), test); };
  if (!entry.failure && entry.granted && all([](const Source& source) { return source.landed; })) {
    if (options_.verify != kVerifyOff && entry.verify != Entry::Verify::kDone) {
      verify(key, entry, out);
      return;
    }
    const auto aux = check_aux(key, entry);
    if (aux) {
      finish(now, at, out);
      return;
    }
    begin_end(now, entry, aux.error(), out);
  }
  if (entry.failure && (!entry.granted || (entry.closes_pending == 0 && all([&](const Source& source) {
                                             return source_quiet(source);
                                           })))) {
    finish(now, at, out);
  }
}

void Rooms::finish(Nanos now, Entries::iterator at, Actions& out) {
  const RoomKey key = at->first;
  Entry& entry = at->second;
  EngineEvent event{.type = EngineEventType::kLanded, .tokens = entry.tokens};
  event.transfer_ns = entry.granted ? static_cast<std::uint64_t>(now - entry.granted_at) : 0;
  for (const Source& source : entry.sources) {
    event.bytes += source.bytes;
    TransferReport report{.key = TransferKey{entry.key, source.rank}, .peer = source.peer};
    report.bytes = source.bytes;
    report.queue_ns = entry.granted_at - entry.created;
    report.total_ns = now - entry.granted_at;
    report.state = !entry.failure                          ? TransferState::kLanded
                   : entry.failure->code == Code::kAborted ? TransferState::kAborted
                                                           : TransferState::kFailed;
    report.error = entry.failure.value_or(Error{});
    if (!entry.told) {
      out.push_back(std::move(report));
    }
  }
  if (entry.failure) {
    event.type = entry.failure->code == Code::kAborted ? EngineEventType::kAborted : EngineEventType::kFailed;
    event.code = entry.failure->code;
    event.reason = entry.failure->message;
    if (entry.sources.empty() && !entry.told) {  // never granted: still one transfer that did not happen
      TransferReport report{.key = TransferKey{entry.key, 0}};
      report.state = entry.failure->code == Code::kAborted ? TransferState::kAborted : TransferState::kFailed;
      report.error = *entry.failure;
      report.total_ns = now - entry.created;
      out.push_back(std::move(report));
    }
  } else {
    for (const auto& [peer, ranks] : entry.targets) {
      out.push_back(SendMessage{peer, message::Landed{entry.key}});
    }
    // Every source has delivered exactly what it announced, and the fabric refuses more from it; closing only
    // forgets the grant, so nobody waits for it.
    CloseGrant close{entry.key, {}};
    std::set<PeerId> peers;
    for (const Source& source : entry.sources) {
      peers.insert(source.peer);
    }
    close.peers.assign(peers.begin(), peers.end());
    out.push_back(std::move(close));
  }
  LocalRank& local = ranks_.at(key.rank);
  own_pages(local, *entry.pages, entry.hybrid, 0);
  tell(key, entry, std::move(event), out);
  entries_.erase(at);
  release_if_idle(key.rank, out);
}

void Rooms::release_if_idle(RankIndex rank, Actions& out) {
  const auto at = ranks_.find(rank);
  const bool busy = std::any_of(entries_.begin(), entries_.end(),
                                [&](const auto& item) { return item.first.rank == rank; });
  if (at != ranks_.end() && at->second.engine == 0 && !busy) {
    ranks_.erase(at);
    out.push_back(ReleasePool{rank});
  }
}

void Rooms::tick(Nanos now, Actions& out) {
  std::vector<std::pair<RoomKey, Error>> late;
  std::map<PeerId, std::pair<std::string, std::uint64_t>> stuck;  // rooms and their pages
  for (auto& [key, entry] : entries_) {
    if (entry.failure) {
      if (now >= entry.ending_at + options_.drain.count()) {
        entry.ending_at = now;
        for (const Source& source : entry.sources) {
          if (!source_quiet(source)) {
            auto& [rooms, pages] = stuck[source.peer];
            rooms += fmt::format("{}{} (decode rank {})", rooms.empty() ? "" : ", ", key.room, key.rank);
            pages += entry.pages->size();
          }
        }
      }
      continue;
    }
    if (!entry.granted && now >= entry.created + options_.bootstrap.count()) {
      const auto& error = services_[entry.service].last_error;
      late.emplace_back(
          key, Error{Code::kDeadline, fmt::format("room {}: prefill was not ready within {} s: {}", key.room,
                                                  options_.bootstrap.count() / 1'000'000'000,
                                                  error ? error->message : "still connecting")});
    } else if (entry.granted && now >= entry.granted_at + options_.transfer.count()) {
      std::string missing;
      for (const Source& source : entry.sources) {
        if (!source.landed || (options_.verify != kVerifyOff && !source.digest)) {
          missing += fmt::format("{}{}", missing.empty() ? "" : ", ", source.rank);
        }
      }
      late.emplace_back(
          key,
          Error{Code::kDeadline, fmt::format("room {}: prefill ranks {} had not delivered within {} s",
                                             key.room, missing, options_.transfer.count() / 1'000'000'000)});
    } else if (!entry.granted) {
      try_grant(now, key, entry, out);
    }
  }
  for (auto& [key, error] : late) {
    begin_end(now, entries_.at(key), std::move(error), out);
    settle(now, key, out);
  }
  for (const auto& [peer, what] : stuck) {
    out.push_back(FencePeer{
        peer,
        Error{Code::kDeadline,
              fmt::format("fenced: it did not drain within {} s; {} pages wait, of rooms {}",
                          options_.drain.count() / 1'000'000'000, what.second, cut_text(what.first, 1000))}});
  }
}

Rooms::Stats Rooms::stats() const {
  Stats out;
  out.stale_messages = stale_messages_;
  for (const auto& [key, entry] : entries_) {
    ++out.rooms;
    out.waiting += entry.granted ? 0 : 1;
    (entry.failure ? out.quarantined_pages : out.live_pages) += entry.pages->size();
  }
  return out;
}

}  // namespace kvferry::decode
