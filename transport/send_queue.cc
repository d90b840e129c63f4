#include "transport/send_queue.h"

#include <algorithm>
#include <utility>

#include "common/base/check.h"

namespace kvferry {

struct SendQueue::Chunk {
  Chunk(ChunkJob chunk_job, const CutLimits& limits) : job(std::move(chunk_job)), cutter(job, limits) {}

  ChunkJob job;
  BlockCutter cutter;  // points into job
  bool all_taken = false;
  std::uint64_t under_way = 0;  // blocks taken and not sent
  std::uint64_t writes = 0;
  Nanos first_post = 0;
  Nanos last_done = 0;
};

struct SendQueue::Transfer {
  TransferKey key;
  std::deque<std::shared_ptr<Chunk>> chunks;  // in order; the first ones may be waiting for sent()
  std::size_t cutting = 0;                    // index of the first chunk that is not all taken
  std::uint64_t total_bytes = 0;
  std::uint64_t total_blocks = 0;
  std::uint64_t bytes_left = 0;  // to be cut
  bool last_added = false;
};

SendQueue::SendQueue(PeerId peer, const SendQueueLimits& limits) : peer_(peer), limits_(limits) {}
SendQueue::~SendQueue() = default;

Result<void> SendQueue::add(ChunkJob job) {
  KVF_TRY_VOID(check_job(job));
  if (chunk_count_ >= limits_.chunks_max) {
    return fail(Code::kExhausted,
                "room {}: {} chunks wait for peer {} already; send again when some are done",
                job.key.grant.room, chunk_count_, peer_);
  }
  std::unique_ptr<Transfer>& slot = transfers_[job.key];
  if (!slot) {
    slot = std::make_unique<Transfer>();
    slot->key = job.key;
  }
  Transfer& transfer = *slot;
  if (transfer.last_added) {
    return fail(Code::kConflict, "room {}: a chunk was posted after the last one", job.key.grant.room);
  }
  transfer.last_added = job.last;
  transfer.bytes_left += job.plan->bytes;
  transfer.chunks.push_back(std::make_shared<Chunk>(std::move(job), limits_.cut));
  ++chunk_count_;
  ready_.set(&transfer, transfer.bytes_left);
  return {};
}

bool SendQueue::take(Taken& taken, Nanos now) {
  while (!ready_.empty()) {
    Transfer& transfer = *ready_.next();
    if (take_from(transfer, taken, now)) {
      transfer.bytes_left -= std::min(transfer.bytes_left, taken.block.header.payload_bytes);  // aux is extra
      ready_.set(&transfer, transfer.bytes_left);
      return true;
    }
    ready_.erase(&transfer);
  }
  return false;
}

bool SendQueue::take_from(Transfer& transfer, Taken& taken, Nanos now) {
  while (transfer.cutting < transfer.chunks.size()) {
    std::shared_ptr<Chunk>& chunk = transfer.chunks[transfer.cutting];
    bool got = chunk->cutter.next(taken.block);
    if (got) {
      transfer.total_bytes += taken.block.header.payload_bytes;
      ++transfer.total_blocks;
      ++chunk->writes;
      chunk->all_taken = chunk->cutter.done() && !chunk->job.last;
    } else {
      if (chunk->job.last) {
        taken.block.spans.clear();
        taken.block.header = make_notice(transfer.key, transfer.total_bytes, transfer.total_blocks);
        got = true;
      }
      chunk->all_taken = true;
    }
    if (got) {
      chunk->first_post = chunk->first_post == 0 ? now : chunk->first_post;
      ++chunk->under_way;
      taken.chunk = chunk;
    }
    if (chunk->all_taken) {
      ++transfer.cutting;
    }
    if (got) {
      return true;
    }
  }
  return false;
}

std::vector<fabric_event::ChunkDone> SendQueue::sent(Taken& taken, Nanos now) {
  const std::shared_ptr<Chunk> chunk = std::move(taken.chunk);
  KVF_CHECK(chunk && chunk->under_way > 0);
  --chunk->under_way;
  chunk->last_done = now;
  const auto found = transfers_.find(chunk->job.key);
  if (found == transfers_.end()) {
    return {};
  }
  const auto& chunks = found->second->chunks;
  if (std::find(chunks.begin(), chunks.end(), chunk) == chunks.end()) {
    return {};  // of a cancelled use of this key
  }
  return complete(*found->second, now);
}

std::vector<fabric_event::ChunkDone> SendQueue::collect_empty(const TransferKey& key, Nanos now) {
  const auto found = transfers_.find(key);
  if (found == transfers_.end()) {
    return {};
  }
  Transfer& transfer = *found->second;
  while (transfer.cutting < transfer.chunks.size()) {
    Chunk& chunk = *transfer.chunks[transfer.cutting];
    if (chunk.job.last || !chunk.cutter.done()) {
      break;
    }
    chunk.all_taken = true;
    ++transfer.cutting;
  }
  return complete(transfer, now);
}

std::vector<fabric_event::ChunkDone> SendQueue::complete(Transfer& transfer, Nanos now) {
  std::vector<fabric_event::ChunkDone> done;
  bool ended = false;
  while (!transfer.chunks.empty() && transfer.cutting > 0) {
    const Chunk& chunk = *transfer.chunks.front();
    if (chunk.under_way > 0) {
      break;
    }
    fabric_event::ChunkDone event{};
    event.peer = peer_;
    event.key = transfer.key;
    event.ticket = chunk.job.ticket;
    event.bytes = chunk.cutter.bytes();
    event.writes = chunk.writes;
    event.first_post = chunk.first_post == 0 ? now : chunk.first_post;
    event.last_done = chunk.last_done == 0 ? now : chunk.last_done;
    done.push_back(event);
    ended = chunk.job.last;
    transfer.chunks.pop_front();
    --transfer.cutting;
    --chunk_count_;
  }
  if (ended) {
    cancel(TransferKey(transfer.key));
  }
  return done;
}

void SendQueue::cancel(const TransferKey& key) {
  const auto found = transfers_.find(key);
  if (found == transfers_.end()) {
    return;
  }
  ready_.erase(found->second.get());
  chunk_count_ -= found->second->chunks.size();
  transfers_.erase(found);
}

}  // namespace kvferry
