// What decode compares its pool with: the digest of every chunk, read before the chunk's pages go back, and
// sent when the last one is there.

#include <algorithm>

#include "prefill/rooms.h"

namespace kvferry::prefill {

void Rooms::digest_chunk(const RoomKey& key, Entry& entry, Destination& to, Actions& out) const {
  if (to.verify == kVerifyOff) {
    return;
  }
  Chunk& chunk = entry.chunks[to.next_chunk];
  auto task = std::make_shared<DigestTask>();
  task->room = key.room;
  task->rate = to.verify;
  task->grid.tokens = {to.prefix, to.tokens};
  task->grid.range = digest_range(task->grid.tokens);
  task->model = model_;
  task->pool = entry.pool;
  task->topology = options_.topology;
  task->coord = options_.topology.coord(key.rank);
  task->pages = chunk.pages;
  task->window_pages = std::make_shared<const std::vector<std::uint32_t>>(chunk.hybrid.window_pages);
  task->rows = {*task->pages, chunk.first, *task->window_pages, chunk.hybrid.window_first,
                chunk.hybrid.state_slot};
  const std::uint64_t end = std::max(chunk.first + chunk.count, to.prefix);
  task->tokens = {std::max(chunk.first, to.prefix), end};
  if (chunk.last) {
    const std::uint64_t window = window_of(options_.model.sliding_window, task->grid.tokens).begin;
    task->window = {window, std::max(window, end)};
    task->state = chunk.hybrid.state_slot.has_value();
  }
  const Peer& peer = peers_.at(to.peer);
  DigestTask::Peer other{peer.topology, peer.topology.coord(to.key.decode_rank), task->grid.tokens, {}};
  for (const PairLayout& layout : *to.layouts) {
    for (const BufferPair& pair : layout.pairs) {
      const std::uint32_t layer = entry.pool->layout().buffers[pair.src_buffer].shape.layer;
      if (layout.elected(key.room) && chunk.carries(layout.space, layer)) {
        other.buffers.push_back(pair.src_buffer);
      }
    }
  }
  std::sort(other.buffers.begin(), other.buffers.end());
  other.buffers.erase(std::unique(other.buffers.begin(), other.buffers.end()), other.buffers.end());
  task->peer = std::move(other);
  ++chunk.digesting;
  out.push_back(DigestChunk{TransferKey{to.key, key.rank}, to.next_chunk, std::move(task)});
}

void Rooms::digest_done(Nanos now, const TransferKey& transfer, std::size_t index, const Digest& digest,
                        Actions& out) {
  const RoomKey key{transfer.grant.room, transfer.prefill_rank};
  const auto at = entries_.find(key);
  if (at == entries_.end() || index >= at->second.chunks.size()) {
    return;  // the room ended meanwhile
  }
  Entry& entry = at->second;
  const auto to = entry.destinations.find(transfer.grant.decode_rank);
  if (to == entry.destinations.end() || to->second.key != transfer.grant) {
    return;
  }
  add_digest(to->second.digest, digest);
  ++to->second.digested;
  entry.chunks[index].digesting -= 1;
  entry.progress = now;
  tell_read(key, entry, out);
  send_digest(key, entry, to->second, out);
}

void Rooms::send_digest(const RoomKey& key, const Entry& entry, Destination& to, Actions& out) const {
  if (to.digest_sent || entry.failure || !entry.last_seen || to.digested != entry.chunks.size()) {
    return;
  }
  to.digest_sent = true;
  out.push_back(SendMessage{to.peer, message::TransferDigest{TransferKey{to.key, key.rank}, entry.next_token,
                                                             std::move(to.digest)}});
}

}  // namespace kvferry::prefill
