// The transfers of a session: which chunk may be copied, what the copies add up to, and how a transfer ends.
#include <cstring>

#include "common/base/check.h"
#include "common/base/clock.h"
#include "kernels/copy.h"
#include "transport/block_cutter.h"
#include "transport/shm/send_core.h"

namespace kvferry {
namespace {

// Forgetting a failed transfer would let its next chunk start afresh and announce too little.
constexpr std::size_t kFailedMax = 65536;

Result<void> check_aux(const ChunkJob& chunk, const Pool& pool) {
  if (!chunk.last && !chunk.aux.empty()) {
    return fail(Code::kInvalid, "room {}: aux goes with the last chunk only", chunk.key.grant.room);
  }
  const std::vector<AuxField>& fields = pool.layout().aux;
  for (const AuxWrite& write : chunk.aux) {
    if (write.dst_field >= fields.size()) {
      return fail(Code::kMismatch, "room {}: aux field {} is needed, the pool of decode rank {} has {}",
                  chunk.key.grant.room, write.dst_field, pool.rank(), fields.size());
    }
    const AuxField& field = fields[write.dst_field];
    if (write.bytes.size() > field.width || chunk.aux_slot >= field.slots) {
      return fail(
          Code::kMismatch,
          "room {}: aux field '{}' of decode rank {}: {} bytes into slot {}, but it has {} slots of {} bytes",
          chunk.key.grant.room, field.name, pool.rank(), write.bytes.size(), chunk.aux_slot, field.slots,
          field.width);
    }
  }
  return {};
}

}  // namespace

void ShmSendFabric::Core::reject_post(PeerId peer, const ChunkJob& job, Error error) {
  sink_(fabric_event::ChunkFailed{peer, job.key, job.ticket, std::move(error)});
}

void ShmSendFabric::Core::handle(Post& command) {
  SessionId id = 0;
  Session* session = session_of(command.peer, &id);
  if (session == nullptr) {
    reject_post(command.peer, command.job, Error{Code::kUnavailable, "this shm peer is not connected"});
    return;
  }
  if (session->state == State::kEnding) {
    return;  // PeerDown follows
  }
  const TransferKey key = command.job.key;
  if (session->failed.contains(key)) {
    reject_post(command.peer, command.job, Error{Code::kAborted, "an earlier chunk of this transfer failed"});
    return;
  }
  auto [found, fresh] = session->transfers.try_emplace(key);
  Transfer& transfer = found->second;
  if (fresh) {
    transfer.lane = next_lane_++;
    lanes_.emplace(transfer.lane, std::pair{id, key});
  }
  if (transfer.state == Transfer::State::kDraining) {
    return;  // Drained follows
  }
  Job job;
  job.chunk = std::move(command.job);
  job.ticket = next_ticket_++;
  transfer.jobs.push_back(std::move(job));
  if (++jobs_ > options_.jobs_max) {
    fail_transfer(
        id, *session, key,
        Error{Code::kExhausted, fmt::format("{} chunks wait for the shm copy threads, limit {} (jobs_max)",
                                            jobs_ - 1, options_.jobs_max)});
    return;
  }
  advance(id, *session, key);
}

void ShmSendFabric::Core::handle(Cancel& command) {
  SessionId id = 0;
  Session* session = session_of(command.peer, &id);
  if (session != nullptr) {
    session->failed.erase(command.key);
    const auto found = session->transfers.find(command.key);
    if (found != session->transfers.end()) {
      Transfer& transfer = found->second;
      ++transfer.drains;
      if (transfer.state == Transfer::State::kRunning && crew_->cancel(transfer.lane)) {
        end_transfer(*session, command.key);
        return;
      }
      transfer.state = Transfer::State::kDraining;
      return;
    }
  }
  sink_(fabric_event::Drained{command.peer, command.key});
}

void ShmSendFabric::Core::handle(Finished& command) {
  const auto lane = lanes_.find(command.lane);
  if (lane == lanes_.end()) {
    return;  // cancelled or failed while the report was under way
  }
  const auto [id, key] = lane->second;
  Session& session = *sessions_.at(id);
  Transfer& transfer = session.transfers.at(key);
  if (transfer.state != Transfer::State::kRunning) {
    return;
  }
  for (Job& job : transfer.jobs) {
    if (job.ticket == command.ticket) {
      job.copied = true;
      job.first_post = command.first_post;
      job.last_done = command.last_done;
      break;
    }
  }
  advance(id, session, key);
}

void ShmSendFabric::Core::handle(Idle& command) {
  const auto lane = lanes_.find(command.lane);
  KVF_CHECK(lane != lanes_.end());  // a transfer with a slice in progress is kept until this report
  const auto [id, key] = lane->second;
  Session& session = *sessions_.at(id);
  if (session.transfers.at(key).state == Transfer::State::kFailing) {
    end_failed(id, session, key);
  } else {
    end_transfer(session, key);
  }
  release_when_idle(id, session);
}

// Starts what can start and reports, in order, what has been copied.
void ShmSendFabric::Core::advance(SessionId id, Session& session, const TransferKey& key) {
  Transfer& transfer = session.transfers.at(key);
  if (transfer.state != Transfer::State::kRunning) {
    return;
  }
  if (auto started = start_jobs(id, session, transfer, key); !started) {
    fail_transfer(id, session, key, std::move(started).error());
    return;
  }
  while (!transfer.jobs.empty() && transfer.jobs.front().copied) {
    Job job = std::move(transfer.jobs.front());
    transfer.jobs.pop_front();
    --transfer.started;
    --jobs_;
    finish_job(id, session, transfer, job);
    if (job.chunk.last) {
      for (const Job& late : transfer.jobs) {
        reject_post(session.peer, late.chunk, Error{Code::kInvalid, "a chunk was posted after the last one"});
      }
      end_transfer(session, key);
      return;
    }
  }
}

/// False when a job waits for its pool.
Result<bool> ShmSendFabric::Core::start_jobs(SessionId id, Session& session, Transfer& transfer,
                                             const TransferKey& key) {
  while (transfer.started < transfer.jobs.size()) {
    KVF_TRY(const bool found, find_pool(session, transfer, key));
    if (!found) {
      if (!transfer.parked) {
        transfer.parked = std::chrono::steady_clock::now() + options_.pool_wait;
        parked_.push_back(Parked{*transfer.parked, id, key});
      }
      return false;
    }
    transfer.parked.reset();
    KVF_TRY_VOID(start_job(transfer, transfer.jobs[transfer.started]));
    ++transfer.started;
  }
  return true;
}

Result<bool> ShmSendFabric::Core::find_pool(Session& session, Transfer& transfer, const TransferKey& key) {
  if (transfer.pool) {
    return true;  // drop_pool() fails the transfer when this pool goes
  }
  const auto found = session.pools.find(key.grant.decode_rank);
  if (found == session.pools.end()) {
    return false;
  }
  if (found->second.error) {
    return fail(*found->second.error);
  }
  transfer.pool = found->second.pool;
  transfer.serial = transfer.pool ? found->second.serial : 0;
  return transfer.pool != nullptr;
}

Result<void> ShmSendFabric::Core::start_job(Transfer& transfer, Job& job) {
  KVF_TRY_VOID(check_job(job.chunk));
  KVF_TRY_VOID(check_aux(job.chunk, *transfer.pool));
  KVF_TRY(job.work,
          shm::CopyWork::make(job.chunk.plan, job.chunk.source, transfer.pool, options_.slice_bytes));
  if (job.work->slices() > 0) {
    crew_->add(transfer.lane, job.ticket, job.work);
  } else {
    job.copied = true;
    job.first_post = job.last_done = steady_now();
  }
  return {};
}

// All bytes of the chunk and of those before it are in place, and ordered before the notice by each copy
// thread's fence and the mailbox.
void ShmSendFabric::Core::finish_job(SessionId id, Session& session, Transfer& transfer, Job& job) {
  std::uint64_t bytes = job.work->bytes();
  std::uint64_t blocks = job.work->blocks();
  for (const AuxWrite& write : job.chunk.aux) {
    const std::span<std::byte> row = transfer.pool->aux_row(write.dst_field, job.chunk.aux_slot);
    std::memcpy(row.data(), write.bytes.data(), write.bytes.size());
    bytes += write.bytes.size();
    ++blocks;
  }
  transfer.bytes += bytes;
  transfer.blocks += blocks;
  if (job.chunk.last) {
    copy_fence();
    const shm::Notice notice{job.chunk.key, transfer.serial, transfer.bytes, transfer.blocks};
    if (auto sent = session.channel->send(shm::to_text(notice)); !sent) {
      ending_.emplace_back(id, std::move(sent).error());
    }
    // A broken socket shows as the end of the stream.
    (void)session.channel->flush();
    watch(id, session);
  }
  sink_(fabric_event::ChunkDone{session.peer, job.chunk.key, job.chunk.ticket, bytes, blocks, job.first_post,
                                job.last_done, 0});
}

// Chunks fail when nothing of the transfer is being copied any more, so that source and destination pages are
// free once the caller knows.
void ShmSendFabric::Core::fail_transfer(SessionId id, Session& session, const TransferKey& key, Error error) {
  Transfer& transfer = session.transfers.at(key);
  if (transfer.state != Transfer::State::kRunning) {
    return;  // the first reason wins, and a cancelled transfer has none
  }
  transfer.error = std::move(error);
  if (crew_->cancel(transfer.lane)) {
    end_failed(id, session, key);
  } else {
    transfer.state = Transfer::State::kFailing;
  }
}

void ShmSendFabric::Core::end_failed(SessionId id, Session& session, const TransferKey& key) {
  const Transfer& transfer = session.transfers.at(key);
  for (const Job& job : transfer.jobs) {
    reject_post(session.peer, job.chunk, transfer.error);
  }
  end_transfer(session, key);
  session.failed.insert(key);
  if (session.failed.size() > kFailedMax) {
    ending_.emplace_back(id, Error{Code::kInternal, "too many failed shm transfers were never cancelled"});
  }
}

void ShmSendFabric::Core::end_transfer(Session& session, const TransferKey& key) {
  const auto found = session.transfers.find(key);
  const std::uint32_t drains = found->second.drains;
  jobs_ -= found->second.jobs.size();
  lanes_.erase(found->second.lane);
  session.transfers.erase(found);
  for (std::uint32_t i = 0; i < drains; ++i) {
    sink_(fabric_event::Drained{session.peer, key});
  }
}

// PeerDown answers for all of them.
void ShmSendFabric::Core::abandon_transfers(Session& session) {
  std::vector<TransferKey> idle;
  for (auto& [key, transfer] : session.transfers) {
    if (transfer.state != Transfer::State::kRunning) {
      transfer.state = Transfer::State::kDraining;  // a slice is in progress, Idle follows
    } else if (crew_->cancel(transfer.lane)) {
      idle.push_back(key);
    } else {
      transfer.state = Transfer::State::kDraining;
    }
  }
  for (const TransferKey& key : idle) {
    end_transfer(session, key);
  }
}

void ShmSendFabric::Core::check_parked(SteadyTime now) {
  while (!parked_.empty() && parked_.front().deadline <= now) {
    Parked entry = parked_.front();
    parked_.pop_front();
    const auto session = sessions_.find(entry.session);
    if (session == sessions_.end()) {
      continue;
    }
    const auto transfer = session->second->transfers.find(entry.key);
    if (transfer == session->second->transfers.end() || transfer->second.parked != entry.deadline) {
      continue;
    }
    const RankIndex rank = entry.key.grant.decode_rank;
    if (session->second->pools.contains(rank)) {  // being mapped, which ends by itself
      transfer->second.parked = entry.deadline = now + options_.pool_wait;
      parked_.push_back(entry);
      continue;
    }
    fail_transfer(entry.session, *session->second, entry.key,
                  Error{Code::kNotFound, fmt::format("decode rank {} has not shown its shm pool within {} ms",
                                                     rank, options_.pool_wait.count())});
  }
}

}  // namespace kvferry
