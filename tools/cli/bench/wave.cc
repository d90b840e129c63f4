#include "tools/cli/bench/wave.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

#include "common/base/narrow.h"
#include "common/base/unique_fd.h"
#include "common/topology/rank_map.h"
#include "tools/cli/bench/process_usage.h"
#include "tools/cli/demo/insist.h"

namespace kvferry {
namespace {

using std::chrono::steady_clock;
using Instant = steady_clock::time_point;

// Far above any transfer: rooms without an event for so long hang.
constexpr std::chrono::seconds kSilenceLimit{60};

double seconds_between(Instant begin, Instant end) {
  return std::chrono::duration<double>(end - begin).count();
}

class Wave {
 public:
  Wave(BenchLink& link, const DemoLayout& layout, const BenchSide& prefill, const BenchSide& decode,
       std::span<const BenchRoom> rooms, Room first_number)
      : link_(link),
        prefill_(prefill),
        decode_(decode),
        rooms_(rooms),
        first_(first_number),
        states_(rooms.size()) {
    for (const BenchRank& rank : prefill.ranks()) {
      const bool needed =
          !prefill_destinations(layout.model, layout.prefill, layout.decode, rank.rows.rank(), 0).empty();
      senders_.push_back(needed);
      sender_count_ += needed ? 1 : 0;
    }
  }

  Result<WaveTimes> run();

 private:
  struct State {
    std::uint32_t granted = 0;  // prefill ranks that know of it
    std::uint32_t landed = 0;   // decode ranks
    std::uint32_t ended = 0;    // prefill ranks
    Instant landed_at{};
  };

  Result<void> expect_all();
  Result<void> send_all();
  Result<void> compare_aux() const;
  Result<void> open_fence();
  /// Waits for what the daemons say, and reads it.
  Result<void> read_events();
  Result<void> on_event(Side side, const kvf_event& event);
  /// Reads events until `count` of the rooms have reached `value`.
  Result<void> await(std::uint32_t State::*count, std::uint64_t value);
  Result<double> cpu(Side side) const { return cpu_seconds(link_.cluster().daemon_pid(side)); }

  BenchLink& link_;
  const BenchSide& prefill_;
  const BenchSide& decode_;
  std::span<const BenchRoom> rooms_;
  Room first_;
  std::vector<State> states_;
  std::vector<bool> senders_;  // prefill ranks that take part
  std::uint32_t sender_count_ = 0;
  UniqueFd fence_;
  std::vector<double> call_seconds_;
  std::uint64_t bytes_ = 0;
};

Result<WaveTimes> Wave::run() {
  for (std::size_t i = 0; i < rooms_.size(); ++i) {
    for (const BenchRank& rank : prefill_.ranks()) {
      fill_aux(rank.memory, rooms_[i].slot, first_ + i);
    }
  }
  KVF_TRY_VOID(expect_all());
  KVF_TRY_VOID(send_all());
  KVF_TRY_VOID(await(&State::granted, sender_count_));
  WaveTimes times;
  std::array<double, 2> before{};
  KVF_TRY(before[0], cpu(Side::kPrefill));
  KVF_TRY(before[1], cpu(Side::kDecode));
  const Instant begin = steady_clock::now();
  KVF_TRY_VOID(open_fence());
  KVF_TRY_VOID(await(&State::landed, decode_.ranks().size()));
  KVF_TRY(times.cpu[0], cpu(Side::kPrefill));
  KVF_TRY(times.cpu[1], cpu(Side::kDecode));
  times.cpu[0] -= before[0];
  times.cpu[1] -= before[1];
  KVF_TRY_VOID(await(&State::ended, sender_count_));
  for (const State& state : states_) {
    times.room_seconds.push_back(seconds_between(begin, state.landed_at));
    times.seconds = std::max(times.seconds, times.room_seconds.back());
  }
  times.call_seconds = std::move(call_seconds_);
  times.bytes = bytes_;
  KVF_TRY_VOID(compare_aux());
  return times;
}

Result<void> Wave::expect_all() {
  for (std::size_t i = 0; i < rooms_.size(); ++i) {
    for (std::size_t rank = 0; rank < decode_.ranks().size(); ++rank) {
      const auto pages = decode_.pages(decode_.ranks()[rank], rooms_[i]);
      kvf_expectation expectation{};
      expectation.struct_size = sizeof(expectation);
      expectation.room = first_ + i;
      expectation.bootstrap = link_.cluster().bootstrap().c_str();
      expectation.pages = pages.data();
      expectation.page_count = pages.size();
      expectation.token_count = rooms_[i].tokens;
      expectation.aux_slot = narrow<int>(rooms_[i].slot);
      expectation.prefill_dp_rank = -1;
      kvf_engine* engine = link_.engines(Side::kDecode)[rank];
      if (insist([&] { return kvf_expect(engine, &expectation); }) != 0) {
        return fail(Code::kUnavailable, "{}: decode rank {} may not expect room {}: {}", link_.fabric(), rank,
                    first_ + i, kvf_last_error(engine));
      }
    }
  }
  return {};
}

Result<void> Wave::send_all() {
  fence_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!fence_) {
    return fail(errno_error("eventfd", errno));
  }
  for (std::size_t i = 0; i < rooms_.size(); ++i) {
    for (std::size_t rank = 0; rank < prefill_.ranks().size(); ++rank) {
      if (!senders_[rank]) {
        continue;
      }
      const auto pages = prefill_.pages(prefill_.ranks()[rank], rooms_[i]);
      kvf_chunk chunk{};
      chunk.struct_size = sizeof(chunk);
      chunk.room = first_ + i;
      chunk.pages = pages.data();
      chunk.page_count = pages.size();
      chunk.token_count = rooms_[i].tokens;
      chunk.last = 1;
      chunk.aux_slot = narrow<int>(rooms_[i].slot);
      chunk.ready_fd = fence_.get();
      kvf_engine* engine = link_.engines(Side::kPrefill)[rank];
      const Instant called = steady_clock::now();
      const int code = insist([&] { return kvf_send(engine, &chunk); });
      call_seconds_.push_back(seconds_between(called, steady_clock::now()));
      if (code != 0) {
        return fail(Code::kUnavailable, "{}: prefill rank {} may not send room {}: {}", link_.fabric(), rank,
                    first_ + i, kvf_last_error(engine));
      }
    }
  }
  return {};
}

Result<void> Wave::open_fence() {
  const std::uint64_t open = 1;
  if (::write(fence_.get(), &open, sizeof(open)) != static_cast<ssize_t>(sizeof(open))) {
    return fail(errno_error("opening the fence", errno));
  }
  return {};
}

Result<void> Wave::await(std::uint32_t State::*count, std::uint64_t value) {
  const auto all_there = [&] {
    for (const State& state : states_) {
      if (state.*count < value) {
        return false;
      }
    }
    return true;
  };
  while (!all_there()) {
    KVF_TRY_VOID(read_events());
  }
  return {};
}

Result<void> Wave::read_events() {
  struct Source {
    Side side;
    kvf_engine* engine;
  };
  std::vector<Source> sources;
  std::vector<pollfd> fds;
  for (const Side side : {Side::kDecode, Side::kPrefill}) {
    for (kvf_engine* engine : link_.engines(side)) {
      sources.push_back({side, engine});
      fds.push_back({kvf_event_fd(engine), POLLIN, 0});
    }
  }
  const int limit = static_cast<int>(std::chrono::milliseconds(kSilenceLimit).count());
  if (::poll(fds.data(), fds.size(), limit) == 0) {
    KVF_TRY_VOID(link_.cluster().check_daemons());
    return fail(Code::kDeadline, "{}: nothing has happened to rooms {} to {} for {} s", link_.fabric(),
                first_, first_ + rooms_.size() - 1, kSilenceLimit.count());
  }
  for (std::size_t i = 0; i < fds.size(); ++i) {
    if (fds[i].revents == 0) {
      continue;
    }
    kvf_event event{};
    event.struct_size = sizeof(event);
    int result = 0;
    while ((result = kvf_next_event(sources[i].engine, &event, 0)) > 0) {
      KVF_TRY_VOID(on_event(sources[i].side, event));
    }
    if (result < 0) {
      KVF_TRY_VOID(link_.cluster().check_daemons());
      return fail(Code::kUnavailable, "{}: the {} daemon went away: {}", link_.fabric(),
                  side_name(sources[i].side), kvf_last_error(sources[i].engine));
    }
  }
  return {};
}

Result<void> Wave::on_event(Side side, const kvf_event& event) {
  if (event.room < first_ || event.room - first_ >= states_.size()) {
    return fail(Code::kProtocol, "{}: {} got event {} for room {}, which is over", link_.fabric(),
                side_name(side), event.type, event.room);
  }
  State& state = states_[event.room - first_];
  switch (event.type) {
    case KVF_EVENT_GRANTED:
      ++state.granted;
      break;
    case KVF_EVENT_LANDED:
      if (side == Side::kPrefill) {
        ++state.ended;
        break;
      }
      bytes_ += event.bytes;
      if (++state.landed == decode_.ranks().size()) {
        state.landed_at = steady_clock::now();
      }
      break;
    case KVF_EVENT_FAILED:
    case KVF_EVENT_ABORTED:
      return fail(Code::kTransport, "{}: room {} failed on the {} side: {}", link_.fabric(), event.room,
                  side_name(side), event_error(event).message);
    default:
      break;
  }
  return {};
}

Result<void> Wave::compare_aux() const {
  for (std::size_t i = 0; i < rooms_.size(); ++i) {
    for (const BenchRank& rank : decode_.ranks()) {
      const AuxReport report = check_aux(rank.memory, rooms_[i].slot, first_ + i);
      if (report.differing > 0) {
        return fail(Code::kCorrupt, "{}: room {} landed with a wrong aux row on decode rank {}: {}",
                    link_.fabric(), first_ + i, rank.rows.rank(), report.first);
      }
    }
  }
  return {};
}

}  // namespace

Result<WaveTimes> run_wave(BenchLink& link, const DemoLayout& layout, const BenchSide& prefill,
                           const BenchSide& decode, std::span<const BenchRoom> rooms, Room first_number) {
  return Wave(link, layout, prefill, decode, rooms, first_number).run();
}

}  // namespace kvferry
