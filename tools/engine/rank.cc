#include "tools/engine/rank.h"

#include <algorithm>
#include <utility>

#include "common/base/check.h"
#include "common/base/log.h"
#include "common/base/narrow.h"
#include "tools/engine/attach_pool.h"

namespace kvferry {
namespace {

constexpr std::chrono::milliseconds kBackOffMin{20};
constexpr std::chrono::milliseconds kBackOffMax{500};
constexpr std::chrono::milliseconds kGrace{50};  // see kvf_writers_gone()

bool may_pass(int code) {
  return code == -KVF_UNAVAILABLE || code == -KVF_NOT_FOUND || code == -KVF_EXHAUSTED || code == -KVF_IO ||
         code == -KVF_CONFLICT;
}

}  // namespace

Result<Rank> Rank::create(const RankOptions& options, RankIndex index) {
  KVF_TRY(RankRows rows, RankRows::create(options.model, options.topology, index, options.page_size,
                                          options.pages, options.rooms));
  KVF_TRY(RankMemory memory, RankMemory::create(rows, options.aux_slots));
  return Rank(std::move(rows), std::move(memory), options);
}

Rank::Rank(RankRows rows_in, RankMemory memory_in, const RankOptions& options)
    : rows(std::move(rows_in)),
      memory(std::move(memory_in)),
      pages(options.pages, options.scatter, options.seed * 1000 + rows.rank()),
      windows(rows.window_pages(), options.scatter, options.seed * 1000 + rows.rank()),
      states(rows.state_slots(), options.scatter, options.seed * 1000 + rows.rank()),
      slots(options.aux_slots, options.scatter, options.seed * 1000 + rows.rank()),
      socket_(options.socket),
      dtype_(to_string(options.model.dtype)),
      coord_(options.topology.coord(rows.rank())),
      page_size_(options.page_size) {}

Rank::~Rank() {
  if (engine_ != nullptr) {
    kvf_detach(engine_);
  }
}

Rank::Rank(Rank&& other) noexcept
    : rows(std::move(other.rows)),
      memory(std::move(other.memory)),
      pages(std::move(other.pages)),
      windows(std::move(other.windows)),
      states(std::move(other.states)),
      slots(std::move(other.slots)),
      socket_(std::move(other.socket_)),
      dtype_(std::move(other.dtype_)),
      coord_(other.coord_),
      page_size_(other.page_size_),
      engine_(std::exchange(other.engine_, nullptr)),
      next_attempt_(other.next_attempt_),
      back_off_(other.back_off_),
      lost_at_(other.lost_at_),
      resting_(std::move(other.resting_)) {}

Result<bool> Rank::attach(Instant now) {
  if (engine_ != nullptr || now < next_attempt_) {
    return false;
  }
  if (!resting_.empty()) {
    next_attempt_ = now + kBackOffMin;
    return false;
  }
  std::string reason;
  const int code = attach_pool({socket_, memory, coord_, page_size_, dtype_}, engine_, reason);
  if (code == 0) {
    back_off_ = kBackOffMin;
    return true;
  }
  engine_ = nullptr;
  if (!may_pass(code)) {
    return fail(code_from_number(static_cast<std::uint8_t>(-code)), "rank {} cannot attach at {}: {}",
                index(), socket_, reason);
  }
  if (std::exchange(last_refusal_, reason) != reason) {
    KVF_LOG_WARN("cannot attach yet", log::kv("rank", index()), log::kv("socket", socket_),
                 log::kv("reason", last_refusal_));
  }
  back_off_ = std::clamp(back_off_ * 2, kBackOffMin, kBackOffMax);
  next_attempt_ = now + back_off_;
  return false;
}

void Rank::lost(Instant now) {
  if (engine_ != nullptr) {
    kvf_detach(engine_);
    engine_ = nullptr;
  }
  lost_at_ = now;
  back_off_ = kBackOffMin;
  next_attempt_ = now + back_off_;
}

void Rank::quarantine(Holding holding) {
  resting_.push_back(std::move(holding));
}

void Rank::end_quarantine(Instant now) {
  if (resting_.empty() || now < lost_at_ + kGrace || kvf_writers_gone(memory.fd()) != 1) {
    return;
  }
  for (const Holding& rested : std::exchange(resting_, {})) {
    release(rested);
  }
}

Result<Holding> Rank::allocate(Room room, std::uint64_t prefix, std::uint64_t end) {
  Holding holding;
  const auto take = [&](PageAllocator& from, std::uint64_t count, std::vector<std::uint32_t>& out) {
    auto got = count <= from.total() ? from.allocate(narrow<std::uint32_t>(count)) : std::nullopt;
    out = got.value_or(std::vector<std::uint32_t>{});
    return got.has_value();
  };
  std::vector<std::uint32_t> state;
  std::vector<std::uint32_t> aux;
  const std::uint64_t needed = rows.pages_for(prefix, end);
  const std::uint64_t window = rows.window_pages_for(prefix, end);
  const std::uint32_t free_before = pages.free_count();
  const bool all = take(pages, needed, holding.pages) && take(windows, window, holding.window_pages) &&
                   take(states, rows.state_slots() == 0 ? 0 : 1, state) && take(slots, 1, aux);
  holding.state_slot = state.empty() ? -1 : narrow<std::int32_t>(state.front());
  holding.slot = aux.empty() ? -1 : narrow<std::int32_t>(aux.front());
  if (!all) {
    release(holding);
    return fail(
        Code::kExhausted,
        "room {} needs {} pages, {} window pages, {} state slots and an aux slot on rank {}, which has {} of "
        "{} pages, {} of {} window pages, {} of {} state slots and {} of {} aux slots free",
        room, needed, window, rows.state_slots() == 0 ? 0 : 1, index(), free_before, pages.total(),
        windows.free_count(), windows.total(), states.free_count(), states.total(), slots.free_count(),
        slots.total());
  }
  return holding;
}

void Rank::release(const Holding& holding) {
  const auto give = [](PageAllocator& to, std::int32_t one) {
    if (one >= 0) {
      const std::uint32_t id = static_cast<std::uint32_t>(one);
      KVF_CHECK(to.release(std::span(&id, 1)).has_value());
    }
  };
  KVF_CHECK(pages.release(holding.pages).has_value());
  KVF_CHECK(windows.release(holding.window_pages).has_value());
  give(states, holding.state_slot);
  give(slots, holding.slot);
}

std::uint32_t Rank::quarantined_pages() const {
  std::size_t count = 0;
  for (const Holding& rested : resting_) {
    count += rested.pages.size();
  }
  return static_cast<std::uint32_t>(count);
}

}  // namespace kvferry
