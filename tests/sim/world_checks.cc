// What must hold after every event, at every landing, and at the end.
#include <algorithm>

#include "tests/sim/world.h"

namespace kvferry::sim {

// Invariants 1 and 5: the machines account for exactly the pages that live engines have given out, and no
// table is above its maximum.
void World::check_pages() {
  for (const auto& daemon : decodes_) {
    if (!daemon->alive) {
      continue;
    }
    std::uint64_t held = 0;
    bool comparable = true;
    for (const RankIndex rank : daemon->ranks) {
      const Engine& engine = decode_engines_.at(rank);
      comparable =
          comparable && engine.alive && engine.id != 0 && daemon->rooms->rank_of(engine.id).has_value();
      for (const auto& [room, item] : engine.held) {
        held += item.pages.size();
      }
    }
    const decode::Rooms::Stats stats = daemon->rooms->stats();
    // The machine lets go of pages a moment before the engine has read its event.
    if (comparable && stats.live_pages + stats.quarantined_pages > held) {
      violation(fmt::format("decode daemon {} counts {} live and {} quarantined pages, its engines gave {}",
                            daemon->index, stats.live_pages, stats.quarantined_pages, held));
    }
  }
  for (const auto* engines : {&prefill_engines_, &decode_engines_}) {
    for (const auto& [rank, engine] : *engines) {
      std::uint64_t held = 0;
      for (const auto& [room, item] : engine.held) {
        held += item.pages.size();
        for (const auto& [first, chunk] : item.chunks) {
          held += chunk.pages.size();
        }
      }
      if (engine.alive && engine.limbo.empty() && engine.free.size() + held != spec_.pages) {
        violation(fmt::format("{} rank {}: {} free and {} held pages, the pool has {}",
                              engine.prefill ? "prefill" : "decode", rank, engine.free.size(), held,
                              spec_.pages));
      }
    }
  }
  for (const auto& [wire, prefill, decode] : wires_) {
    if (wire->queued() > spec_.jobs_per_peer_max) {
      violation(fmt::format("{} chunks wait in a send queue of {}", wire->queued(), spec_.jobs_per_peer_max));
    }
  }
}

// Invariant 3, at decode: every byte of every source is there, and it is this use's.
void World::check_bytes(const Engine& engine, const Held& held) {
  const Use& use = *held.use;
  bool wrong = false;
  for_rows(
      spec_.model, spec_.decode, *engine.pool, held.pages, use.prefix, use.tokens, [&](const OwnedRow& row) {
        const BufferShape& shape = engine.pool->layout().buffers[row.buffer].shape;
        for (std::size_t i = 0; i < row.bytes.size() && !wrong; ++i) {
          if (row.bytes[i] != content(use.number, shape.layer, shape.kind, row.head_byte + i, row.token)) {
            wrong = true;
            violation(fmt::format("room {} landed with wrong bytes: decode rank {} layer {} token {} byte {}",
                                  use.room, engine.rank, shape.layer, row.token, i));
          }
        }
      });
  if (use.aux && !wrong) {
    const auto row = engine.pool->aux_row(0, static_cast<std::uint32_t>(aux_slot(use)));
    for (std::size_t i = 0; i < row.size(); ++i) {
      if (row[i] != aux_content(use.number, i)) {
        violation(fmt::format("room {} landed with wrong metadata on decode rank {}", use.room, engine.rank));
        return;
      }
    }
  }
}

// At prefill: landed means that every decode rank it served has all its bytes. Its engine may not have been
// told yet, or have died since; but none of them may have been told otherwise.
void World::check_delivered(const Engine& engine, const Use& use) {
  for (const RankIndex rank :
       prefill_destinations(spec_.model, spec_.prefill, spec_.decode, engine.rank, 0)) {
    const Fate fate = use.decode.at(rank);
    if (!disturbed_ && (fate == Fate::kFailed || fate == Fate::kAborted)) {
      violation(fmt::format("prefill rank {} was told that room {} landed, decode rank {} that it did not",
                            engine.rank, use.room, rank));
    }
  }
}

// Empty when everything has ended that ever began, everyone is alive, and every page is back.
std::string World::unfinished() const {
  for (const auto& [room, use] : uses_) {
    if (!ended(*use)) {
      std::string who;
      for (const auto* fates : {&use->prefill, &use->decode}) {
        for (const auto& [rank, fate] : *fates) {
          who += fate != Fate::kNone
                     ? ""
                     : fmt::format(" {} rank {}{},", fates == &use->prefill ? "prefill" : "decode", rank,
                                   fates == &use->decode && use->granted.contains(rank) ? " (granted)" : "");
        }
      }
      return fmt::format("room {} (use {}) on{}", room, use->number, who);
    }
  }
  for (const auto* engines : {&prefill_engines_, &decode_engines_}) {
    for (const auto& [rank, engine] : *engines) {
      if (time_.now() < engine.drought_until) {
        return fmt::format("rank {}: its pool is exhausted", rank);
      }
      if (!engine.alive || engine.id == 0 || !engine.held.empty() || !engine.limbo.empty()) {
        return fmt::format("{} engine of rank {}: alive {}, attached {}, {} rooms",
                           engine.prefill ? "prefill" : "decode", rank, engine.alive, engine.id != 0,
                           engine.held.size());
      }
      if (engine.free.size() != spec_.pages) {
        return fmt::format("rank {}: {} of {} pages are back", rank, engine.free.size(), spec_.pages);
      }
    }
  }
  for (const auto& daemon : prefills_) {
    if (!daemon->alive || daemon->rooms->stats().rooms != 0) {
      return fmt::format("prefill daemon {}: alive {}, {} rooms", daemon->index, daemon->alive,
                         daemon->alive ? daemon->rooms->stats().rooms : 0);
    }
  }
  for (const auto& daemon : decodes_) {
    if (!daemon->alive || daemon->rooms->stats().rooms != 0) {
      return fmt::format("decode daemon {}: alive {}, {} rooms", daemon->index, daemon->alive,
                         daemon->alive ? daemon->rooms->stats().rooms : 0);
    }
  }
  return {};
}

}  // namespace kvferry::sim
