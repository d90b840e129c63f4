// From "both sides are there" to "posted": planning each chunk for each destination, in order.

#include <algorithm>

#include "prefill/rooms.h"

namespace kvferry::prefill {
namespace {

// A router may add the first sampled token to decode's prompt, so decode may expect one token more than
// prefill computed; decode computes that one itself.
constexpr std::uint64_t kDecodeExtraTokens = 1;

// A chunk is posted as one job per part. Jobs of a transfer complete in order, so its last job's ticket says
// that the chunk has been read.
std::uint64_t ticket_of(std::size_t chunk, bool final_part) {
  return std::uint64_t{chunk} * 2 + (final_part ? 1 : 0);
}

}  // namespace

bool Rooms::complete(const Entry& entry) const {
  return entry.expected && std::all_of(entry.expected->begin(), entry.expected->end(),
                                       [&](RankIndex rank) { return entry.destinations.contains(rank); });
}

std::vector<AuxWrite> Rooms::aux_writes(const Entry& entry, const Destination& to) const {
  std::vector<AuxWrite> writes;
  if (!to.has_aux || !to.sends_aux) {
    return writes;
  }
  const std::vector<AuxShape>& remote = to.remote->aux;
  for (std::size_t index = 0; index < remote.size(); ++index) {
    const auto field = std::find_if(entry.aux.begin(), entry.aux.end(),
                                    [&](const AuxBytes& mine) { return mine.name == remote[index].name; });
    if (field != entry.aux.end() && field->bytes.size() == remote[index].width) {
      writes.push_back(AuxWrite{static_cast<std::uint32_t>(index), field->bytes});
    }
  }
  return writes;
}

Result<void> Rooms::post_chunk(Nanos now, const RoomKey& key, Entry& entry, Destination& to, Actions& out) {
  const Chunk& chunk = entry.chunks[to.next_chunk];
  if (chunk.first > to.prefix && to.next_chunk == 0) {
    return fail(Code::kInvalid, "prefill sends tokens from {} on, decode holds only the first {}",
                chunk.first, to.prefix);
  }
  const std::uint64_t end = chunk.first + chunk.count;
  if (chunk.last && (end > to.tokens || end + kDecodeExtraTokens < to.tokens)) {
    return fail(Code::kMismatch, "prefill computed {} tokens, decode rank {} expects {}", end,
                to.key.decode_rank, to.tokens);
  }
  if (to.layouts == nullptr) {
    KVF_TRY_VOID(bind_layout(key.rank, to));
  }
  const Nanos started = options_.stopwatch ? options_.stopwatch() : 0;
  KVF_TRY(auto plans, plan_chunk_parts(entry, chunk, to, key.room));
  to.report.plan_ns += options_.stopwatch ? options_.stopwatch() - started : 0;
  digest_chunk(key, entry, to, out);
  if (plans.empty() && !chunk.last) {
    chunk_read(key, entry, to.next_chunk++, out);
    return {};
  }
  if (plans.empty()) {
    plans.push_back(std::make_shared<const Plan>());  // the notice still has to go
  }
  if (chunk.last && to.has_aux && to.sends_aux && entry.aux.empty()) {
    return fail(Code::kInvalid, "decode rank {} expects aux data, the last chunk named no aux_slot",
                to.key.decode_rank);
  }
  if (!to.posted_any) {
    to.report.queue_ns = now - std::max(to.granted, entry.created);
  }
  to.posted_any = true;
  for (std::size_t part = 0; part < plans.size(); ++part) {
    const bool final_part = part + 1 == plans.size();
    ChunkJob job;
    job.key = TransferKey{to.key, key.rank};
    job.source = entry.pool;
    job.plan = std::move(plans[part]);
    job.last = chunk.last && final_part;
    job.ticket = ticket_of(to.next_chunk, final_part);
    job.aux_slot = to.aux_slot;
    if (job.last) {
      job.aux = aux_writes(entry, to);
    }
    ++to.in_flight;
    ++peers_.at(to.peer).in_flight;
    out.push_back(PostChunk{to.peer, std::move(job)});
  }
  ++to.next_chunk;
  return {};
}

bool Rooms::Chunk::carries(RowSpace space, std::uint32_t layer) const {
  if (space == RowSpace::kWindow || space == RowSpace::kState) {
    return last;
  }
  return layer_end == 0 || (layer >= layer_begin && layer < layer_end);
}

// The plans of the chunk's parts that have anything to move, in the order in which they are posted.
Result<std::vector<std::shared_ptr<const Plan>>> Rooms::plan_chunk_parts(const Entry& entry,
                                                                         const Chunk& chunk,
                                                                         const Destination& to,
                                                                         Room room) const {
  const auto& buffers = entry.pool->layout().buffers;
  const std::uint64_t end = chunk.first + chunk.count;
  PartRequest request;
  request.tokens = {std::max(chunk.first, to.prefix), std::max(end, to.prefix)};
  request.request = {to.prefix, to.tokens};
  request.window = options_.model.sliding_window;
  request.last = chunk.last;
  request.src = {*chunk.pages, chunk.first, chunk.hybrid.window_pages, chunk.hybrid.window_first,
                 chunk.hybrid.state_slot};
  request.dst = {*to.pages, to.prefix, to.hybrid.window_pages, to.hybrid.window_first, to.hybrid.state_slot};
  std::vector<std::shared_ptr<const Plan>> plans;
  for (const PairLayout& layout : *to.layouts) {
    if (layout.pairs.empty() || !layout.elected(room)) {
      continue;
    }
    const auto stays = [&](const BufferPair& pair) {
      return !chunk.carries(layout.space, buffers[pair.src_buffer].shape.layer);
    };
    if (std::all_of(layout.pairs.begin(), layout.pairs.end(), stays)) {
      continue;
    }
    KVF_TRY(Plan plan, plan_part(layout, request));
    if (std::erase_if(plan.pairs, stays) > 0) {
      plan.bytes = 0;
      for (const BufferPair& pair : plan.pairs) {
        plan.bytes += plan.rows * pair.bytes;
      }
    }
    if (!plan.runs.empty()) {
      plans.push_back(std::make_shared<const Plan>(std::move(plan)));
    }
  }
  return plans;
}

void Rooms::pump(Nanos now, const RoomKey& key, Entry& entry, Actions& out) {
  if (entry.failure || entry.engine == 0) {
    return;
  }
  if (!entry.granted_told && complete(entry)) {
    entry.granted_told = true;
    out.push_back(TellEngine{entry.engine, EngineEvent{.type = EngineEventType::kGranted,
                                                       .room = key.room,
                                                       .tokens = entry.destinations.begin()->second.prefix}});
  }
  for (auto& [rank, to] : entry.destinations) {
    const auto peer = peers_.find(to.peer);
    const bool reads = to.sends && !to.landed;
    if (reads && (peer == peers_.end() || !peer->second.ready || peer->second.lost)) {
      continue;
    }
    while (to.next_chunk < entry.chunks.size() && entry.chunks[to.next_chunk].fence == 0) {
      if (!reads) {
        chunk_read(key, entry, to.next_chunk++, out);
        continue;
      }
      // A full queue is no failure: the chunk waits until the fabric has finished others (BL-41).
      if (peer->second.in_flight >= options_.jobs_per_peer_max) {
        if (!to.waits) {
          to.waits = true;
          peer->second.waiting.push_back(key);
        }
        break;
      }
      const auto posted = post_chunk(now, key, entry, to, out);
      if (!posted) {
        begin_end(now, key, entry, posted.error(), out);
        return;
      }
    }
  }
}

// The fabric has finished with jobs of this peer: rooms that waited for a place in its queue go on.
void Rooms::jobs_done(Nanos now, PeerId id, std::uint32_t jobs, Actions& out) {
  const auto at = peers_.find(id);
  if (at == peers_.end()) {
    return;
  }
  Peer& peer = at->second;
  peer.in_flight -= std::min(jobs, peer.in_flight);
  for (std::size_t left = peer.waiting.size(); left > 0 && peer.in_flight < options_.jobs_per_peer_max;
       --left) {
    const RoomKey key = peer.waiting.front();
    peer.waiting.pop_front();
    const auto entry = entries_.find(key);
    if (entry == entries_.end()) {
      continue;
    }
    for (auto& [rank, to] : entry->second.destinations) {
      to.waits = to.waits && to.peer != id;
    }
    pump(now, key, entry->second, out);
    settle(now, key, out);
  }
}

// A chunk's pages are free for the engine once every expected destination has read them.
void Rooms::chunk_read(const RoomKey& key, Entry& entry, std::size_t index, Actions& out) {
  ++entry.chunks[index].read_by;
  tell_read(key, entry, out);
}

void Rooms::tell_read(const RoomKey& key, Entry& entry, Actions& out) {
  if (entry.engine == 0 || !complete(entry)) {
    return;
  }
  for (std::size_t index = entry.first_unread; index < entry.chunks.size(); ++index) {
    Chunk& chunk = entry.chunks[index];
    if (!chunk.reported && chunk.digesting == 0 && chunk.read_by == entry.expected->size()) {
      chunk.reported = true;
      out.push_back(TellEngine{entry.engine, EngineEvent{.type = EngineEventType::kChunkDone,
                                                         .room = key.room,
                                                         .tokens = chunk.first,
                                                         .layer_end = chunk.layer_end}});
    }
    entry.first_unread += chunk.reported && index == entry.first_unread ? 1 : 0;
  }
}

void Rooms::on_fabric(Nanos now, const FabricEvent& event, Actions& out) {
  const auto find = [&](const TransferKey& key) -> std::pair<Entry*, Destination*> {
    const auto at = entries_.find({key.grant.room, key.prefill_rank});
    if (at != entries_.end()) {
      const auto to = at->second.destinations.find(key.grant.decode_rank);
      if (to != at->second.destinations.end() && to->second.key == key.grant) {
        return {&at->second, &to->second};
      }
    }
    ++stale_messages_;
    return {nullptr, nullptr};
  };
  if (const auto* done = std::get_if<fabric_event::ChunkDone>(&event)) {
    const RoomKey key{done->key.grant.room, done->key.prefill_rank};
    if (const auto [entry, to] = find(done->key); entry != nullptr) {
      to->in_flight -= to->in_flight > 0 ? 1 : 0;
      to->report.bytes += done->bytes;
      to->report.writes += done->writes;
      to->report.pack_ns += done->pack;
      to->first_post = to->first_post == 0 ? done->first_post : to->first_post;
      to->last_done = done->last_done;
      entry->progress = now;
      if (const std::size_t chunk = done->ticket / 2;
          done->ticket == ticket_of(chunk, true) && chunk < entry->chunks.size()) {
        chunk_read(key, *entry, chunk, out);
      }
      settle(now, key, out);
    }
    jobs_done(now, done->peer, 1, out);
  } else if (const auto* failed = std::get_if<fabric_event::ChunkFailed>(&event)) {
    const RoomKey key{failed->key.grant.room, failed->key.prefill_rank};
    if (const auto [entry, to] = find(failed->key); entry != nullptr) {
      begin_end(now, key, *entry, failed->error, out);
      settle(now, key, out);
    } else {
      jobs_done(now, failed->peer, 1, out);
    }
  } else if (const auto* drained = std::get_if<fabric_event::Drained>(&event)) {
    const RoomKey key{drained->key.grant.room, drained->key.prefill_rank};
    if (const auto [entry, to] = find(drained->key); entry != nullptr && !to->drained) {
      to->drained = true;
      out.push_back(SendMessage{to->peer, message::TransferDrained{drained->key}});
      const std::uint32_t jobs = to->in_flight;
      settle(now, key, out);
      jobs_done(now, drained->peer, jobs, out);
    }
  } else if (const auto* down = std::get_if<fabric_event::PeerDown>(&event)) {
    peer_lost(now, down->peer, down->error, out);
    std::vector<RoomKey> touched;
    for (auto& [key, entry] : entries_) {
      for (auto& [rank, to] : entry.destinations) {
        if (to.peer == down->peer) {
          to.drained = true;
          touched.push_back(key);
        }
      }
    }
    for (const RoomKey& key : touched) {
      settle(now, key, out);
    }
    peers_.erase(down->peer);
  }
}

}  // namespace kvferry::prefill
