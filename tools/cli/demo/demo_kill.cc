// The kill of a daemon in the middle of transfers (--kill): what must then happen to the rooms, the pages and
// the processes that survive.

#include <algorithm>

#include "tools/cli/demo/demo_run.h"

namespace kvferry {
namespace {

using std::chrono::duration;
using std::chrono::steady_clock;

// Of DeepSeek-V3 these are 288 MB: tens of milliseconds at memory speed, while the kill takes one.
constexpr std::uint64_t kKillTokens = 4096;

bool names_one_of(const std::string& reason, const std::vector<std::string>& names) {
  return std::any_of(names.begin(), names.end(),
                     [&](const std::string& name) { return reason.find(name) != std::string::npos; });
}

}  // namespace

// As soon as enough is under way that the kill cannot come too late; in the second half of the trace,
// whatever is under way has to do.
bool DemoRun::kill_is_due() const {
  if (options_.kill.empty() || kill_done_ || results_.landed < options_.kill_after) {
    return false;
  }
  std::uint64_t tokens = 0;
  for (const auto& [id, room] : rooms_.all()) {
    tokens += room.transfers() ? room.tokens - room.prefix : 0;
  }
  return tokens >= kKillTokens || (tokens > 0 && next_ > trace_.size() / 2);
}

Result<void> DemoRun::kill_and_recover(DemoCluster& cluster) {
  kill_done_ = true;
  const Side victim = options_.kill == "prefill" ? Side::kPrefill : Side::kDecode;
  std::size_t cut = 0;
  for (auto& [id, room] : rooms_.all()) {
    room.hit_by_kill = true;
    room.cut_by_kill = room.transfers();
    cut += room.cut_by_kill ? 1 : 0;
  }
  const std::uint64_t landed_before = results_.landed;
  const Instant killed_at = steady_clock::now();
  cluster.kill_daemon(victim);
  attached_[static_cast<std::size_t>(victim)] = false;
  progress_.note(fmt::format("killed the {} daemon with {} rooms in flight, {} of them transferring",
                             side_name(victim), rooms_.size(), cut));
  while (rooms_.size() > 0) {
    KVF_TRY_VOID(step(cluster));
  }
  report_killed(killed_at, results_.landed - landed_before);
  judge_killed(cluster, victim);
  KVF_TRY_VOID(cluster.restart_daemon(victim));
  KVF_TRY_VOID(await_attached(cluster));
  KVF_TRY_VOID(await_balance(cluster));
  progress_.note(
      fmt::format("the {} daemon is back {:.3f} s after the kill, its engine attached again; {} pages are "
                  "still out; {} requests left for it",
                  side_name(victim), duration<double>(steady_clock::now() - killed_at).count(),
                  results_.leaked_pages, trace_.size() - next_));
  if (next_ == trace_.size()) {
    results_.problems.push_back("no request is left to show that new rooms land; use more --requests");
  }
  last_event_ = steady_clock::now();
  return {};
}

void DemoRun::report_killed(Instant killed_at, std::uint64_t landed) {
  Instant last_hit = killed_at;
  Instant last = killed_at;
  for (const DemoRoom& room : killed_) {
    last = std::max(last, room.last_ending);
    if (room.cut_by_kill) {
      last_hit = std::max(last_hit, room.last_ending);
    }
  }
  progress_.note(fmt::format(
      "{:.3f} s from the kill to the last final event of the transferring rooms, {:.3f} s to that "
      "of all {} rooms; {} of them landed all the same",
      duration<double>(last_hit - killed_at).count(), duration<double>(last - killed_at).count(),
      killed_.size(), landed));
  const auto failed = std::find_if(killed_.begin(), killed_.end(), [](const DemoRoom& room) {
    return !room.endings[0]->landed && !room.endings[1]->landed;
  });
  if (failed != killed_.end()) {
    progress_.note(fmt::format("for example room {}: prefill: {}; decode: {}", failed->room,
                               failed->endings[0]->reason, failed->endings[1]->reason));
  }
}

// A room that was transferring must have failed on the surviving side by itself, with a reason that names the
// daemon that died; a room that landed on one side before the news must not be called failed there.
void DemoRun::judge_killed(DemoCluster& cluster, Side victim) {
  const auto names = cluster.daemon_names(victim);
  for (DemoRoom& room : killed_) {
    const RoomEnding& survivor = *room.ending(other(victim));
    if (room.aborted_by_us && room.cut_by_kill) {
      results_.problems.push_back(
          fmt::format("room {} did not end by itself on the {} side after the {} daemon died", room.room,
                      side_name(other(victim)), side_name(victim)));
    } else if (!survivor.landed && room.cut_by_kill && !names_one_of(survivor.reason, names)) {
      results_.problems.push_back(
          fmt::format("room {}: the reason on the {} side does not name the dead daemon ({}): {}", room.room,
                      side_name(other(victim)), fmt::join(names, ", "), survivor.reason));
    }
  }
}

}  // namespace kvferry
