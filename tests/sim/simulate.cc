// Runs seeds until the time is up, on every core, and prints what they did. A seed that violates an invariant
// is repeated with fewer and fewer faults, and ends the program with its shortest list.
//
//   simulate [--seconds N] [--first SEED] [--seed SEED] [--until-caught]
//
// --until-caught is for builds with a planted fault: success is finding it, within --seconds.

#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string_view>
#include <thread>
#include <vector>

#include "tests/sim/world.h"

namespace {

using namespace kvferry;
using Clock = std::chrono::steady_clock;

struct Options {
  double seconds = 60;
  std::uint64_t first = 1;
  std::uint64_t only = 0;
  bool until_caught = false;
};

struct Totals {
  std::atomic<std::uint64_t> next{0};
  std::atomic<bool> stop{false};
  std::condition_variable ended;  // stop is set
  std::mutex mutex;               // guards all below
  std::uint64_t seeds = 0;
  sim::Outcome sum;
  std::uint64_t failing = 0;  // the lowest failing seed
};

void add(sim::Outcome& sum, const sim::Outcome& one) {
  sum.events += one.events;
  sum.landed += one.landed;
  sum.failed += one.failed;
  sum.aborted += one.aborted;
  sum.bytes += one.bytes;
  sum.stale += one.stale;
  sum.flipped += one.flipped;
  sum.caught += one.caught;
}

void work(Totals& totals, Clock::time_point end) {
  while (!totals.stop && Clock::now() < end) {
    const std::uint64_t seed = totals.next++;
    const sim::Outcome outcome = sim::run_seed(seed);
    const std::lock_guard lock(totals.mutex);
    ++totals.seeds;
    add(totals.sum, outcome);
    if (!outcome.violations.empty()) {
      totals.failing = totals.failing == 0 ? seed : std::min(totals.failing, seed);
      totals.stop = true;
      totals.ended.notify_all();
    }
  }
}

int explain(std::uint64_t seed) {
  const sim::Spec spec = sim::random_spec(seed);
  const std::vector<sim::Fault> all = sim::faults_of(spec);
  const sim::Outcome outcome = sim::World(spec, all).run();
  fmt::print("{}\n{} faults, {} events, trace {:016x}: {} landed, {} failed, {} aborted\n", describe(spec),
             all.size(), outcome.events, outcome.hash, outcome.landed, outcome.failed, outcome.aborted);
  for (const std::string& violation : outcome.violations) {
    fmt::print("  violated at {}\n", violation);
  }
  if (outcome.violations.empty()) {
    return 0;
  }
  const std::vector<sim::Fault> few = sim::shortest(spec, all);
  fmt::print("the shortest set of faults that still does it, {} of {}:\n", few.size(), all.size());
  for (const sim::Fault& fault : few) {
    fmt::print("  {}\n", describe(fault));
  }
  for (const std::string& violation : sim::World(spec, few).run().violations) {
    fmt::print("  violated at {}\n", violation);
  }
  fmt::print("repeat it with: tools/simulate --seed {}\n", seed);
  return 1;
}

bool read(int argc, char** argv, Options& options) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view name = argv[i];
    if (name == "--until-caught") {
      options.until_caught = true;
      continue;
    }
    if (i + 1 == argc) {
      return false;
    }
    const char* value = argv[++i];
    if (name == "--seconds") {
      options.seconds = std::strtod(value, nullptr);
    } else if (name == "--minutes") {
      options.seconds = std::strtod(value, nullptr) * 60;
    } else if (name == "--first") {
      options.first = std::strtoull(value, nullptr, 0);
    } else if (name == "--seed") {
      options.only = std::strtoull(value, nullptr, 0);
    } else {
      return false;
    }
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  if (!read(argc, argv, options)) {
    fmt::print(stderr,
               "usage: simulate [--seconds N | --minutes N] [--first SEED] [--seed SEED] [--until-caught]\n");
    return 2;
  }
  if (options.only != 0) {
    return explain(options.only);
  }
  // The same seed twice must be the same run, event by event.
  if (sim::run_seed(options.first).hash != sim::run_seed(options.first).hash) {
    fmt::print("seed {} is not the same run twice\n", options.first);
    return 1;
  }
  Totals totals;
  totals.next = options.first;
  const auto begin = Clock::now();
  const auto end =
      begin + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(options.seconds));
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < std::max(1u, std::thread::hardware_concurrency()); ++i) {
    threads.emplace_back([&] { work(totals, end); });
  }
  if (::isatty(1) != 0) {
    std::unique_lock lock(totals.mutex);
    while (!totals.stop && Clock::now() < end) {
      totals.ended.wait_for(lock, std::chrono::milliseconds(200));
      fmt::print("\r{} seeds, {} events", totals.seeds, totals.sum.events);
      std::fflush(stdout);
    }
    fmt::print("\r");
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  fmt::print(
      "simulate: seeds {} to {}: {} runs, {} events ({:.0f} per second), {} rooms landed, {} failed, {} "
      "aborted, {} bytes moved, {} stale messages ignored; {} bytes were changed on the way, {} engines were "
      "told of wrong bytes\n",
      options.first, totals.next.load() - 1, totals.seeds, totals.sum.events,
      static_cast<double>(totals.sum.events) / seconds, totals.sum.landed, totals.sum.failed,
      totals.sum.aborted, totals.sum.bytes, totals.sum.stale, totals.sum.flipped, totals.sum.caught);
  if (totals.failing == 0) {
    return options.until_caught ? (fmt::print("the planted fault was NOT caught\n"), 1) : 0;
  }
  if (options.until_caught) {
    fmt::print("the planted fault was caught by seed {} after {} runs: {}\n", totals.failing, totals.seeds,
               sim::run_seed(totals.failing).violations.front());
    return 0;
  }
  return explain(totals.failing);
}
