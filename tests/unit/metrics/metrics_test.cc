// What an operator's scrape sees: every series from the start, no growth with traffic, numbers that add up.
#include "common/metrics/metrics.h"

#include <catch2/catch.hpp>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <sstream>
#include <thread>

#include <fmt/format.h>

namespace kvferry {
namespace {

using Scrape = std::map<std::string, double>;

Scrape scrape(const Metrics& metrics) {
  Scrape series;
  std::istringstream text(metrics.text());
  for (std::string line; std::getline(text, line);) {
    if (line.empty() || line[0] == '#') {
      continue;
    }
    const std::size_t blank = line.rfind(' ');
    const bool fresh =
        series.emplace(line.substr(0, blank), std::strtod(line.c_str() + blank, nullptr)).second;
    if (!fresh) {
      FAIL("series appears twice: " << line);
    }
  }
  return series;
}

double value(const Scrape& series, const std::string& name) {
  const auto found = series.find(name);
  if (found == series.end()) {
    FAIL("no series " << name);
  }
  return found->second;
}

MetricsOptions options() {
  MetricsOptions result;
  result.version = "1.2.3";
  result.rules = {"page_size", "model_layers"};
  return result;
}

TEST_CASE("every series is there with 0 at the first scrape") {
  const Metrics metrics(options());
  const Scrape series = scrape(metrics);
  for (const char* name : {"kvferry_transfers_total{state=\"landed\"}",
                           "kvferry_transfers_total{state=\"failed\"}",
                           "kvferry_transfers_total{state=\"aborted\"}",
                           "kvferry_transfer_bytes_total{direction=\"sent\",fabric=\"shm\"}",
                           "kvferry_transfer_bytes_total{direction=\"received\",fabric=\"ucx\"}",
                           "kvferry_transfer_writes_total{fabric=\"tcp\"}",
                           "kvferry_transfers_live",
                           "kvferry_rooms_waiting",
                           "kvferry_pages{owner=\"engine\"}",
                           "kvferry_pages{owner=\"live\"}",
                           "kvferry_pages{owner=\"quarantine\"}",
                           "kvferry_handshakes_total{verdict=\"accepted\"}",
                           "kvferry_handshakes_total{verdict=\"refused\"}",
                           "kvferry_handshake_refusals_total{rule=\"page_size\"}",
                           "kvferry_handshake_refusals_total{rule=\"model_layers\"}",
                           "kvferry_stale_messages_total{kind=\"control\"}",
                           "kvferry_rejected_blocks_total",
                           "kvferry_engines",
                           "kvferry_peers",
                           "kvferry_transfer_seconds_count",
                           "kvferry_transfer_size_bytes_sum",
                           "kvferry_transfer_stage_seconds_count{stage=\"queue\"}",
                           "kvferry_transfer_stage_seconds_count{stage=\"plan\"}",
                           "kvferry_transfer_stage_seconds_count{stage=\"pack\"}",
                           "kvferry_transfer_stage_seconds_count{stage=\"post\"}",
                           "kvferry_transfer_stage_seconds_count{stage=\"land\"}",
                           "kvferry_transfer_seconds_bucket{le=\"60\"}"}) {
    INFO(name);
    CHECK(value(series, name) == 0);
  }
  for (const Code code :
       {Code::kInvalid, Code::kNotFound, Code::kConflict, Code::kMismatch, Code::kExhausted,
        Code::kUnauthorized, Code::kDeadline, Code::kPeerLost, Code::kAborted, Code::kEngineLost,
        Code::kUnavailable, Code::kTransport, Code::kProtocol, Code::kCorrupt, Code::kIo, Code::kInternal}) {
    const std::string word(to_string(code));
    CHECK(value(series, "kvferry_transfer_failures_total{reason=\"" + word + "\"}") == 0);
  }
  CHECK(value(series, "kvferry_build_info{version=\"1.2.3\"}") == 1);
  const double now = static_cast<double>(
      std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch())
          .count());
  CHECK(value(series, "process_start_time_seconds") <= now + 2);
  CHECK(value(series, "process_start_time_seconds") > now - 24 * 3600);
}

TEST_CASE("each kind of failure has a count of its own, and all of them add up (BL-55)") {
  Metrics metrics(options());
  // A refused handshake's rooms, a transport's error, a lost peer, an expired room, an engine's death, wrong
  // bytes.
  const Code causes[] = {Code::kMismatch, Code::kTransport,  Code::kPeerLost,
                         Code::kDeadline, Code::kEngineLost, Code::kCorrupt};
  double times = 0;
  for (const Code cause : causes) {
    times += 1;
    for (int i = 0; i < static_cast<int>(times); ++i) {
      metrics.count_failed(cause);
    }
  }
  metrics.count_aborted();
  const Scrape series = scrape(metrics);
  double expected = 0;
  for (const Code cause : causes) {
    expected += 1;
    CHECK(value(series, fmt::format("kvferry_transfer_failures_total{{reason=\"{}\"}}", to_string(cause))) ==
          expected);
  }
  CHECK(value(series, "kvferry_transfers_total{state=\"failed\"}") == 21);
  CHECK(value(series, "kvferry_transfers_total{state=\"aborted\"}") == 1);
  CHECK(value(series, "kvferry_transfer_failures_total{reason=\"internal\"}") == 0);
}

void one_transfer(Metrics& metrics, std::uint64_t number) {
  metrics.count_moved(number % 2 == 0 ? MoveDirection::kSent : MoveDirection::kReceived,
                      number % 5 == 0 ? "carrier pigeon" : "tcp", 1000, 3);
  metrics.set_transfers_live(number % 7);
  switch (number % 4) {
    case 0:
      metrics.count_failed(code_from_number(static_cast<std::uint8_t>(number % 256)));
      break;
    case 1:
      metrics.count_aborted();
      break;
    default:
      metrics.count_landed(4096, TransferSeconds{0.001, 0.0001, std::nullopt, 0.5, 2.0, 2.6});
  }
}

TEST_CASE("a hundred thousand transfers add no series and the counters add up") {
  Metrics metrics(options());
  const std::size_t before = scrape(metrics).size();
  constexpr std::uint64_t kPerThread = 25000;
  std::vector<std::thread> threads;
  for (std::uint64_t thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&metrics, thread] {
      for (std::uint64_t i = 0; i < kPerThread; ++i) {
        one_transfer(metrics, thread * kPerThread + i);
      }
    });
  }
  // Scraping meanwhile, as a Prometheus server does.
  for (int i = 0; i < 20; ++i) {
    CHECK(scrape(metrics).size() == before);
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  const Scrape series = scrape(metrics);
  CHECK(series.size() == before);
  CHECK(value(series, "kvferry_transfers_total{state=\"landed\"}") == 50000);
  CHECK(value(series, "kvferry_transfers_total{state=\"aborted\"}") == 25000);
  CHECK(value(series, "kvferry_transfers_total{state=\"failed\"}") == 25000);
  double failures = 0;
  double bytes = 0;
  for (const auto& [name, number] : series) {
    failures += name.rfind("kvferry_transfer_failures_total{", 0) == 0 ? number : 0;
    bytes += name.rfind("kvferry_transfer_bytes_total{", 0) == 0 ? number : 0;
  }
  CHECK(failures == 25000);
  CHECK(bytes == 1000.0 * 100000);
  CHECK(value(series, "kvferry_transfer_bytes_total{direction=\"sent\",fabric=\"other\"}") == 1000.0 * 10000);
  CHECK(value(series, "kvferry_transfer_writes_total{fabric=\"tcp\"}") == 3.0 * 80000);
  CHECK(value(series, "kvferry_transfer_seconds_count") == 50000);
  CHECK(value(series, "kvferry_transfer_stage_seconds_count{stage=\"post\"}") == 50000);
  CHECK(value(series, "kvferry_transfer_stage_seconds_count{stage=\"pack\"}") == 0);
  CHECK(value(series, "kvferry_transfer_size_bytes_bucket{le=\"4096\"}") == 50000);
}

TEST_CASE("gauges show the last value, handshakes their verdict and every violated rule once") {
  Metrics metrics(options());
  metrics.set_pages(PageCounts{10, 20, 30});
  metrics.set_engines(4);
  metrics.set_peers(5);
  metrics.set_rooms_waiting(6);
  metrics.count_handshake_accepted();
  metrics.count_handshake_refused({"page_size", "page_size", "model_layers", "a rule of tomorrow"});
  metrics.count_stale("fabric", 7);
  metrics.count_rejected_block();
  const Scrape series = scrape(metrics);
  CHECK(value(series, "kvferry_pages{owner=\"engine\"}") == 10);
  CHECK(value(series, "kvferry_pages{owner=\"live\"}") == 20);
  CHECK(value(series, "kvferry_pages{owner=\"quarantine\"}") == 30);
  CHECK(value(series, "kvferry_engines") == 4);
  CHECK(value(series, "kvferry_peers") == 5);
  CHECK(value(series, "kvferry_rooms_waiting") == 6);
  CHECK(value(series, "kvferry_handshakes_total{verdict=\"accepted\"}") == 1);
  CHECK(value(series, "kvferry_handshakes_total{verdict=\"refused\"}") == 1);
  CHECK(value(series, "kvferry_handshake_refusals_total{rule=\"page_size\"}") == 1);
  CHECK(value(series, "kvferry_handshake_refusals_total{rule=\"model_layers\"}") == 1);
  CHECK(value(series, "kvferry_handshake_refusals_total{rule=\"other\"}") == 1);
  CHECK(value(series, "kvferry_stale_messages_total{kind=\"fabric\"}") == 7);
  CHECK(value(series, "kvferry_rejected_blocks_total") == 1);
}

std::size_t peer_series(const Metrics& metrics) {
  std::size_t found = 0;
  for (const auto& [name, number] : scrape(metrics)) {
    found += name.rfind("kvferry_peer_fabric_info{", 0) == 0 ? 1 : 0;
  }
  return found;
}

TEST_CASE("peers have a bounded number of series, without ports, and lose them when they go") {
  Metrics metrics(options());
  for (PeerId id = 1; id <= 200; ++id) {
    metrics.set_peer_fabric(id, "host-" + std::to_string(id) + ":8998", "tcp", "tcp 4x");
  }
  CHECK(peer_series(metrics) == 64);
  CHECK(scrape(metrics).contains(
      "kvferry_peer_fabric_info{carries=\"tcp 4x\",fabric=\"tcp\",peer=\"host-1\"}"));
  for (PeerId id = 1; id <= 200; ++id) {
    metrics.remove_peer(id);
  }
  CHECK(peer_series(metrics) == 0);
  // Two daemons on one host, told apart by port only.
  metrics.set_peer_fabric(1, "[fd00::7]:8998", "shm", "shm 2x avx512");
  metrics.set_peer_fabric(2, "[fd00::7]:8999", "shm", "shm 2x avx512");
  CHECK(peer_series(metrics) == 1);
  metrics.remove_peer(1);
  CHECK(peer_series(metrics) == 1);
  metrics.remove_peer(2);
  CHECK(peer_series(metrics) == 0);
  // What a peer says about itself cannot break the format.
  metrics.set_peer_fabric(3, "a\"b\\c\nd", "tcp", "x\"} 1\nkvferry_fake 2");
  metrics.set_peer_fabric(3, "a\"b\\c\nd", "tcp", "x\"} 1\nkvferry_fake 3");
  CHECK(peer_series(metrics) == 1);
  CHECK_FALSE(scrape(metrics).contains("kvferry_fake"));
}

TEST_CASE("promtool finds nothing to complain about") {
  if (std::system("command -v promtool >/dev/null 2>&1") != 0) {
    WARN("left out: promtool is not installed (Debian package prometheus)");
    return;
  }
  Metrics metrics(options());
  for (std::uint64_t number = 0; number < 100; ++number) {
    one_transfer(metrics, number);
  }
  metrics.set_peer_fabric(1, "decode-1", "shm", "shm 1x avx512");
  FILE* promtool = ::popen("promtool check metrics 2>&1", "w");
  REQUIRE(promtool != nullptr);
  const std::string text = metrics.text();
  CHECK(std::fwrite(text.data(), 1, text.size(), promtool) == text.size());
  CHECK(::pclose(promtool) == 0);
}

}  // namespace
}  // namespace kvferry
