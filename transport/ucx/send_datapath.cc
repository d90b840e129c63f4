// Send side: transfers, chunks and blocks.
#include <algorithm>

#include "common/base/clock.h"
#include "transport/ucx/send_core.h"

namespace kvferry {

using ucx::Op;

UcxSendFabric::Core::Transfer& UcxSendFabric::Core::transfer_for(Peer& peer, const TransferKey& key) {
  auto& slot = peer.transfers[key];
  if (!slot) {
    slot = std::make_unique<Transfer>();
    slot->key = key;
    slot->peer = &peer;
    peer.order.set(slot.get(), 0);
  }
  return *slot;
}

void UcxSendFabric::Core::erase_transfer(Peer& peer, const TransferKey& key) {
  const auto it = peer.transfers.find(key);
  peer.order.erase(it->second.get());
  peer.transfers.erase(it);
}

void UcxSendFabric::Core::do_post(PeerId id, ChunkJob job) {
  Peer* peer = find_peer(id);
  if (peer == nullptr) {
    sink_(fabric_event::ChunkFailed{
        id, job.key, job.ticket,
        Error{Code::kUnavailable, fmt::format("ucx: peer {} is not connected", id)}});
    return;
  }
  if (peer->state == Peer::State::kClosing) {
    return;  // PeerDown is on its way
  }
  Transfer& transfer = transfer_for(*peer, job.key);
  if (transfer.cancels > 0) {
    return;  // Drained is on its way
  }
  auto chunk = std::make_unique<Chunk>();
  chunk->job = std::move(job);
  chunk->transfer = &transfer;
  const bool after_last = !transfer.chunks.empty() && transfer.chunks.back()->job.last;
  if (transfer.failed || after_last) {
    sink_(fabric_event::ChunkFailed{
        id, chunk->job.key, chunk->job.ticket,
        Error{Code::kInvalid,
              after_last ? "ucx: a chunk after the last one" : "ucx: the transfer has failed already"}});
    return;
  }
  transfer.bytes_left += chunk->job.plan->bytes;
  peer->order.set(&transfer, transfer.bytes_left);
  transfer.chunks.push_back(std::move(chunk));
}

void UcxSendFabric::Core::do_cancel(PeerId id, const TransferKey& key) {
  Peer* peer = find_peer(id);
  if (peer == nullptr || (peer->state == Peer::State::kConnecting)) {
    // Nothing has been posted, so nothing can land.
    if (peer != nullptr && peer->transfers.contains(key)) {
      erase_transfer(*peer, key);
    }
    sink_(fabric_event::Drained{id, key});
    return;
  }
  Transfer& transfer = transfer_for(*peer, key);
  if (transfer.cancels++ > 0) {
    return;
  }
  for (auto& chunk : transfer.chunks) {
    chunk->posted = true;
    chunk->segment_waits = false;
  }
  transfer.next = transfer.chunks.size();
  if (transfer.tail != Tail::kFlushing) {
    transfer.tail = Tail::kNone;
  }
}

void UcxSendFabric::Core::fail_transfer(Transfer& transfer, const Error& error) {
  transfer.failed = true;
  // Chunks before it are under way and still report.
  for (std::size_t i = transfer.next; i < transfer.chunks.size(); ++i) {
    Chunk& chunk = *transfer.chunks[i];
    chunk.posted = true;
    chunk.failed = true;
    chunk.segment_waits = false;
    sink_(fabric_event::ChunkFailed{transfer.peer->id, chunk.job.key, chunk.job.ticket, error});
  }
  transfer.next = transfer.chunks.size();
}

void UcxSendFabric::Core::pump_transfers(Peer& peer) {
  Transfer* served = nullptr;
  const auto take = [&](Transfer* transfer) {
    served = transfer;
    return step(*transfer);
  };
  while (!peer.endpoint->failed() && !peer.endpoint->window_is_full() && peer.order.offer_turn(take)) {
    peer.order.set(served, served->bytes_left);
  }
  reap(peer);
}

// Posts one operation; false when it has none or the window is full.
bool UcxSendFabric::Core::step(Transfer& transfer) {
  if (transfer.next == transfer.chunks.size()) {
    return step_tail(transfer);
  }
  Chunk& chunk = *transfer.chunks[transfer.next];
  if (!chunk.prepared && !prepare(chunk)) {
    return false;
  }
  if (chunk.puts) {
    return post_put(chunk);
  }
  return post_block(chunk);
}

bool UcxSendFabric::Core::prepare(Chunk& chunk) {
  if (auto legal = check_job(chunk.job); !legal) {
    fail_transfer(*chunk.transfer, legal.error());
    return false;
  }
  if (options_.put_mode()) {
    return prepare_puts(chunk);
  }
  chunk.blocks = std::make_unique<BlockCutter>(chunk.job, cut_limits_);
  chunk.prepared = true;
  return true;
}

void UcxSendFabric::Core::count_post(Chunk& chunk, std::uint64_t bytes) {
  ++chunk.in_flight;
  ++chunk.writes;
  chunk.bytes += bytes;
  chunk.transfer->bytes_left -= std::min(chunk.transfer->bytes_left, bytes);  // aux is extra
  if (chunk.first_post == 0) {
    chunk.first_post = steady_now();
  }
}

bool UcxSendFabric::Core::post_block(Chunk& chunk) {
  Transfer& transfer = *chunk.transfer;
  Peer& peer = *transfer.peer;
  Op* op = peer.endpoint->take();
  if (op == nullptr) {
    return false;
  }
  if (!chunk.blocks->next(scratch_)) {
    peer.endpoint->give_back(op);
    chunk.posted = true;
    ++transfer.next;
    return true;
  }
  ucx::encode_block_message(ucx::BlockMessage{peer.session, 0, scratch_.header},
                            std::span(op->header).first<ucx::kBlockMessageBytes>());
  op->header_bytes = ucx::kBlockMessageBytes;
  for (const auto& span : scratch_.spans) {
    op->pieces.push_back(ucx::IoPiece{span.data(), span.size()});
  }
  op->owner = &chunk;
  op->done = &Core::chunk_op_done;
  count_post(chunk, scratch_.header.payload_bytes);
  transfer.total_bytes += scratch_.header.payload_bytes;
  ++transfer.total_blocks;
  blocks_.fetch_add(1, std::memory_order_relaxed);
  peer.endpoint->send(ucx::kBlock, op);
  return true;
}

void UcxSendFabric::Core::chunk_op_done(Op& op, bool) {
  auto* chunk = static_cast<Chunk*>(op.owner);
  --chunk->in_flight;
  chunk->last_done = steady_now();
}

void UcxSendFabric::Core::flush_done(Op& op, bool) {
  static_cast<Transfer*>(op.owner)->tail = Tail::kFlushed;
}

// The notice after the last chunk, or the drain after a cancellation; in put mode both wait for a flush.
bool UcxSendFabric::Core::step_tail(Transfer& transfer) {
  const bool ends = transfer.cancels > 0 ||
                    (!transfer.failed && !transfer.chunks.empty() && transfer.chunks.back()->job.last);
  if (!ends || transfer.tail == Tail::kDone || transfer.tail == Tail::kFlushing) {
    return false;
  }
  const bool idle = std::all_of(transfer.chunks.begin(), transfer.chunks.end(),
                                [](const auto& chunk) { return chunk->in_flight == 0; });
  if (transfer.cancels > 0 && !idle) {
    return false;
  }
  Op* op = transfer.peer->endpoint->take();
  if (op == nullptr) {
    return false;
  }
  if (options_.put_mode() && transfer.tail == Tail::kNone) {
    op->owner = &transfer;
    op->done = &Core::flush_done;
    transfer.tail = Tail::kFlushing;
    transfer.peer->endpoint->flush(op);
    return true;
  }
  transfer.tail = Tail::kDone;
  if (transfer.cancels > 0) {
    transfer.peer->endpoint->give_back(op);
    transfer.peer->outbox.push_block(transfer.peer->session, make_drain(transfer.key));
    transfer.peer->outbox.flush(*transfer.peer->endpoint);
  } else {
    post_notice(transfer, op);
  }
  return true;
}

void UcxSendFabric::Core::post_notice(Transfer& transfer, Op* op) {
  const BlockHeader notice = make_notice(transfer.key, transfer.total_bytes, transfer.total_blocks);
  ucx::encode_block_message(ucx::BlockMessage{transfer.peer->session, transfer.put_bytes, notice},
                            std::span(op->header).first<ucx::kBlockMessageBytes>());
  op->header_bytes = ucx::kBlockMessageBytes;
  Chunk& chunk = *transfer.chunks.back();
  op->owner = &chunk;
  op->done = &Core::chunk_op_done;
  ++chunk.in_flight;
  if (chunk.first_post == 0) {
    chunk.first_post = steady_now();
  }
  transfer.peer->endpoint->send(ucx::kBlock, op);
}

void UcxSendFabric::Core::on_block(Peer& peer, const ucx::Message& message) {
  const auto block = ucx::decode_block_message(message.header);
  if (!block || block->block.type != BlockType::kDrained) {
    peer.down = Error{Code::kProtocol, "ucx: the decode daemon sent a block that is no drained answer"};
    return;
  }
  const auto it = peer.transfers.find(block->block.key);
  if (it == peer.transfers.end() || it->second->cancels == 0 || it->second->tail != Tail::kDone) {
    return;
  }
  const std::uint32_t owed = it->second->cancels;
  const TransferKey key = it->first;
  erase_transfer(peer, key);
  for (std::uint32_t i = 0; i < owed; ++i) {
    sink_(fabric_event::Drained{peer.id, key});
  }
}

// Reports chunks that are done, in order, and forgets transfers that are over.
void UcxSendFabric::Core::reap(Peer& peer) {
  for (auto it = peer.transfers.begin(); it != peer.transfers.end();) {
    Transfer& transfer = *(it++)->second;
    if (reap_transfer(transfer)) {
      erase_transfer(peer, TransferKey(transfer.key));
    }
  }
}

bool UcxSendFabric::Core::reap_transfer(Transfer& transfer) {
  if (transfer.cancels > 0) {
    return false;  // its end is Drained
  }
  while (!transfer.chunks.empty()) {
    Chunk& chunk = *transfer.chunks.front();
    if (!chunk.posted || chunk.in_flight != 0 || transfer.peer->endpoint->failed()) {
      return false;
    }
    if (chunk.failed) {
      transfer.chunks.pop_front();
      --transfer.next;
      continue;
    }
    if (chunk.job.last && transfer.tail != Tail::kDone) {
      return false;
    }
    const bool over = chunk.job.last;
    sink_(fabric_event::ChunkDone{transfer.peer->id, chunk.job.key, chunk.job.ticket, chunk.bytes,
                                  chunk.writes, chunk.first_post, chunk.last_done, chunk.pack});
    transfer.chunks.pop_front();
    --transfer.next;
    if (over) {
      return true;
    }
  }
  return false;
}

}  // namespace kvferry
