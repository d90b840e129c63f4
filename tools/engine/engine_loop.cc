#include "tools/engine/engine_loop.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "tools/engine/decode_role.h"
#include "tools/engine/prefill_role.h"

namespace kvferry {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// How long the loop sleeps when nothing but time can bring work: retries of refused calls, quarantine.
constexpr milliseconds kTick{20};
constexpr milliseconds kTickBlocked{2};

}  // namespace

Result<std::unique_ptr<EngineLoop>> EngineLoop::create(const Options& options) {
  std::unique_ptr<EngineLoop> loop(new EngineLoop(options));
  loop->ranks_.reserve(options.ranks.size());
  for (const RankIndex index : options.ranks) {
    KVF_TRY(Rank rank, Rank::create(options.rank, index));
    loop->ranks_.push_back(std::move(rank));
  }
  const RoleOptions role{options.rank.model, options.rank.topology.dp, options.rank.seed};
  if (options.side == EngineSide::kPrefill) {
    loop->role_ = std::make_unique<PrefillRole>(role, loop->ranks_, *loop);
  } else {
    loop->role_ = std::make_unique<DecodeRole>(role, loop->ranks_, *loop);
  }
  return loop;
}

Result<void> EngineLoop::run() {
  while (!quit_) {
    const Instant now = steady_clock::now();
    KVF_TRY_VOID(attach_ranks(now));
    for (Rank& rank : ranks_) {
      if (rank.attached() && !read_events(rank, now)) {
        const std::string reason = fmt::format("the daemon at {} went away: {}", options_.rank.socket,
                                               kvf_last_error(rank.engine()));
        rank.lost(now);
        if (std::exchange(attached_, false)) {
          emit({{"event", "lost"}, {"reason", reason}});
        }
        role_->on_lost(rank, reason);
      }
      rank.end_quarantine(now);
    }
    wait(role_->work(now), now);
  }
  emit(stats());
  return {};
}

void EngineLoop::emit(const nlohmann::json& event) {
  // Nobody reads any more: the router is gone, and with it the reason to go on.
  quit_ = !write_line(options_.events, event) || quit_;
}

Result<void> EngineLoop::attach_ranks(Instant now) {
  bool all = true;
  for (Rank& rank : ranks_) {
    auto attached = rank.attach(now);
    if (!attached) {
      emit({{"event", "refused"}, {"reason", attached.error().message}});
      return fail(std::move(attached).error());
    }
    all = all && rank.attached();
  }
  if (all && !std::exchange(attached_, true)) {
    emit({{"event", "attached"}, {"ranks", ranks_.size()}});
  }
  return {};
}

// False: the connection is gone.
bool EngineLoop::read_events(Rank& rank, Instant now) {
  while (true) {
    kvf_event event{};
    event.struct_size = sizeof(event);
    const int result = kvf_next_event(rank.engine(), &event, 0);
    if (result <= 0) {
      return result == 0;
    }
    role_->on_event(rank, event, now);
  }
}

void EngineLoop::wait(bool busy, Instant now) {
  std::vector<pollfd> fds{{options_.commands, POLLIN, 0}};
  milliseconds timeout = busy ? milliseconds(0) : kTick;
  for (const Rank& rank : ranks_) {
    if (rank.attached()) {
      fds.push_back({kvf_event_fd(rank.engine()), POLLIN, 0});
    } else if (!busy) {
      const auto left = std::chrono::ceil<milliseconds>(rank.next_attempt() - now);
      timeout = std::clamp(left, milliseconds(0), timeout);
    }
  }
  if (!busy && role_->waits_for_retry()) {
    timeout = std::min(timeout, kTickBlocked);
  }
  const int ready = ::poll(fds.data(), fds.size(), static_cast<int>(timeout.count()));
  if (ready > 0 && fds.front().revents != 0) {
    read_commands();
  }
}

void EngineLoop::read_commands() {
  std::array<char, 65536> bytes{};
  const ssize_t count = ::read(options_.commands, bytes.data(), bytes.size());
  if (count < 0 && (errno == EINTR || errno == EAGAIN)) {
    return;
  }
  if (count <= 0) {
    quit_ = true;
    return;
  }
  auto lines = lines_.add({bytes.data(), static_cast<std::size_t>(count)});
  if (!lines) {
    emit({{"event", "refused"}, {"reason", lines.error().message}});
    quit_ = true;
    return;
  }
  for (const std::string& line : *lines) {
    on_line(line);
  }
}

void EngineLoop::on_line(const std::string& line) {
  const auto command = parse_line(line);
  const auto op = command ? read_text(*command, "op") : Result<std::string>(tl::unexpected(command.error()));
  if (!op) {
    emit({{"event", "refused"}, {"reason", op.error().message}});
    return;
  }
  if (*op == "quit") {
    quit_ = true;
    return;
  }
  if (*op == "stats") {
    emit(stats());
    return;
  }
  const auto done = role_->on_command(*op, *command);
  if (!done) {
    const auto room = read_number(*command, "room", 1, kRoomMax);
    emit(failure_event(room ? *room : 0, done.error()));
  }
}

nlohmann::json EngineLoop::stats() const {
  nlohmann::json ranks = nlohmann::json::array();
  for (const Rank& rank : ranks_) {
    const std::uint32_t quarantined = rank.quarantined_pages();
    ranks.push_back({{"rank", rank.index()},
                     {"pages", rank.pages.total()},
                     {"free", rank.pages.free_count()},
                     {"live", rank.pages.live_count() - quarantined},
                     {"quarantined", quarantined},
                     {"slots", rank.slots.total()},
                     {"slots_free", rank.slots.free_count()}});
  }
  return {{"event", "stats"}, {"ranks", std::move(ranks)}};
}

}  // namespace kvferry
