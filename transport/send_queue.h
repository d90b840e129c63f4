#pragma once
// What waits to be sent to one peer: the chunks of all transfers, cut into blocks on demand, in the order of
// send_order.h. Pure and single-threaded; the owner sends the blocks it takes, over one stream or several,
// and reports each one as sent.
//
//   add() -> take() ... sent() -> ChunkDone, in the order of the transfer's chunks
//
// The notice of a transfer is the last block of its last chunk.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "common/base/result.h"
#include "transport/block_cutter.h"
#include "transport/fabric.h"
#include "transport/send_order.h"

namespace kvferry {

struct SendQueueLimits {
  CutLimits cut;
  std::size_t chunks_max = 1 << 16;  // waiting chunks of one peer
};

class SendQueue {
 public:
  struct Chunk;
  /// A block on its way. Holds the source pool until sent() or destruction.
  struct Taken {
    CutBlock block;
    std::shared_ptr<Chunk> chunk;
  };

  SendQueue(PeerId peer, const SendQueueLimits& limits);
  ~SendQueue();

  /// kInvalid for a chunk that does not fit its pool, kConflict after the transfer's last chunk, kExhausted
  /// above chunks_max. A chunk that was refused changes nothing.
  Result<void> add(ChunkJob job);
  /// The next block; false when there is none. Reuses the capacity of `taken`.
  bool take(Taken& taken, Nanos now);
  /// The block's bytes have been handed over; its source rows are not read any more.
  std::vector<fabric_event::ChunkDone> sent(Taken& taken, Nanos now);
  /// Chunks that carry nothing (an empty plan, not the last) complete without a block.
  std::vector<fabric_event::ChunkDone> collect_empty(const TransferKey& key, Nanos now);
  /// Forgets the transfer. Blocks already taken may still be sent; they complete nothing.
  void cancel(const TransferKey& key);

  bool empty() const { return ready_.empty(); }
  std::size_t chunk_count() const { return chunk_count_; }

 private:
  struct Transfer;
  bool take_from(Transfer& transfer, Taken& taken, Nanos now);
  std::vector<fabric_event::ChunkDone> complete(Transfer& transfer, Nanos now);

  PeerId peer_;
  SendQueueLimits limits_;
  std::size_t chunk_count_ = 0;
  std::unordered_map<TransferKey, std::unique_ptr<Transfer>> transfers_;
  SendOrder<Transfer*> ready_;  // those with something to cut, by bytes left; owned by transfers_
};

}  // namespace kvferry
