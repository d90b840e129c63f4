// The kill of a daemon in the middle of transfers (--kill): what must then happen to the rooms, the pages and
// the processes that survive.

#include <algorithm>

#include "tools/cli/demo/demo_run.h"

namespace kvferry {
namespace {

using std::chrono::duration;
using std::chrono::steady_clock;

bool names_one_of(const std::string& reason, const std::vector<std::string>& names) {
  return std::any_of(names.begin(), names.end(),
                     [&](const std::string& name) { return reason.find(name) != std::string::npos; });
}

}  // namespace

bool DemoRun::kill_is_due() const {
  if (options_.kill.empty() || kill_done_ || results_.landed < options_.kill_after) {
    return false;
  }
  return std::any_of(rooms_.all().begin(), rooms_.all().end(),
                     [](const auto& entry) { return entry.second.transfers(); });
}

Result<void> DemoRun::kill_and_recover(DemoCluster& cluster) {
  kill_done_ = true;
  const Side victim = options_.kill == "prefill" ? Side::kPrefill : Side::kDecode;
  std::vector<Room> hit;
  for (auto& [id, room] : rooms_.all()) {
    room.hit_by_kill = true;
    if (room.transfers()) {
      hit.push_back(id);
    }
  }
  const std::uint64_t landed_before = results_.landed;
  const Instant killed_at = steady_clock::now();
  cluster.kill_daemon(victim);
  attached_[static_cast<std::size_t>(victim)] = false;
  progress_.note(fmt::format("killed the {} daemon with {} rooms in flight, {} of them transferring",
                             side_name(victim), rooms_.size(), hit.size()));
  while (rooms_.size() > 0) {
    KVF_TRY_VOID(step(cluster));
  }
  const duration<double> taken = last_event_ - killed_at;
  progress_.note(
      fmt::format("{:.3f} s from the kill to the last final event of {} rooms ({} landed all the same)",
                  taken.count(), killed_.size(), results_.landed - landed_before));
  judge_killed(cluster, victim, hit);
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

// A room that was transferring must have failed on the surviving side by itself, with a reason that names the
// daemon that died; a room that landed on one side before the news must not be called failed there.
void DemoRun::judge_killed(DemoCluster& cluster, Side victim, const std::vector<Room>& hit) {
  const auto names = cluster.daemon_names(victim);
  for (DemoRoom& room : killed_) {
    const bool transferred = std::find(hit.begin(), hit.end(), room.room) != hit.end();
    const RoomEnding& survivor = *room.ending(other(victim));
    if (room.aborted_by_us && transferred) {
      results_.problems.push_back(
          fmt::format("room {} did not end by itself on the {} side after the {} daemon died", room.room,
                      side_name(other(victim)), side_name(victim)));
    } else if (!survivor.landed && transferred && !names_one_of(survivor.reason, names)) {
      results_.problems.push_back(
          fmt::format("room {}: the reason on the {} side does not name the dead daemon ({}): {}", room.room,
                      side_name(other(victim)), fmt::join(names, ", "), survivor.reason));
    }
  }
  if (!killed_.empty()) {
    const DemoRoom& room = killed_.front();
    progress_.note(fmt::format("for example room {}: prefill {}; decode {}", room.room,
                               room.endings[0]->landed ? "landed" : room.endings[0]->reason,
                               room.endings[1]->landed ? "landed" : room.endings[1]->reason));
  }
}

}  // namespace kvferry
