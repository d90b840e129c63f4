// How long it takes to plan a long request: 131,072 tokens of a 61-layer MLA model, page 64, prefill DCP 1 ->
// decode DCP 8, all eight decode ranks, scattered pages. Prints one JSON object. With --numpy it also runs
// plan_numpy.py (the per-token method) beside this source and prints the ratio; the checksums over all
// (source row, destination row) must agree. "million" is the same for 1,000,000 tokens, prefill TP 2 ->
// decode TP 8 with DCP 8, with what posting the plans costs beside one write per token and layer. Exit status
// 1 when a checksum differs, when a plan depends on the layer count, or when the plans do not cover all
// tokens.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "common/plan/plan.h"
#include "common/topology/rank_map.h"
#include "tests/support/rng.h"

namespace kvferry {
namespace {

constexpr std::uint32_t kTokens = 131072;
constexpr std::uint32_t kMillion = 1000000;
constexpr std::uint32_t kPage = 64;
constexpr std::uint32_t kRanks = 8;

/// Every decode rank with the one source that a room elects for it, scattered pages.
struct Request {
  std::uint32_t tokens = 0;
  std::vector<PairLayout> layouts;
  std::vector<std::uint32_t> src;
  std::vector<std::uint32_t> dst;
};

Request make_request(std::uint32_t tokens, std::uint32_t layers, std::uint32_t prefill_tp) {
  ModelGeometry model = *preset_geometry("deepseek-v3");
  model.hidden_layers = layers;
  model.kv_layers.resize(layers);
  Topology prefill;
  prefill.tp = prefill_tp;
  Topology decode;
  decode.tp = decode.dcp = kRanks;
  const std::uint32_t src_pages = (tokens + kPage - 1) / kPage;
  const std::uint32_t dst_pages = (src_pages + kRanks - 1) / kRanks;
  Request request{tokens, {}, test::shuffled_pages(src_pages, 1), test::shuffled_pages(dst_pages, 2)};
  for (RankIndex rank = 0; rank < kRanks; ++rank) {
    const RankCoord to = decode.coord(rank);
    const RankShape dst{decode, to, kPage, rank_buffers(model, decode, to, dst_pages)};
    for (const RankIndex source : decode_targets(model, prefill, decode, rank, 0, 1).sources) {
      const RankCoord from = prefill.coord(source);
      const RankShape src{prefill, from, kPage, rank_buffers(model, prefill, from, src_pages)};
      request.layouts.push_back(*pair_layout(model, src, dst));
    }
  }
  return request;
}

std::vector<Plan> plan_all(const Request& request) {
  std::vector<Plan> plans;
  plans.reserve(request.layouts.size());
  for (const PairLayout& layout : request.layouts) {
    plans.push_back(*plan_chunk(layout, {0, request.tokens, 0, 0, request.src, request.dst}));
  }
  return plans;
}

double median_seconds(const Request& request) {
  std::vector<double> seconds;
  for (int i = 0; i < 501; ++i) {
    const auto start = std::chrono::steady_clock::now();
    const std::vector<Plan> plans = plan_all(request);
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  std::nth_element(seconds.begin(), seconds.begin() + 250, seconds.end());
  return seconds[250];
}

struct Memory {
  std::size_t runs = 0;
  std::size_t run_bytes = 0;
  std::size_t pair_bytes = 0;
};

Memory memory_of(const std::vector<Plan>& plans) {
  Memory memory;
  for (const Plan& plan : plans) {
    memory.runs += plan.runs.size();
    memory.run_bytes += plan.runs.capacity() * sizeof(RowRun);
    memory.pair_bytes += plan.pairs.capacity() * sizeof(BufferPair);
  }
  return memory;
}

std::uint64_t checksum(const std::vector<Plan>& plans) {
  std::uint64_t sum = 0;
  for (const Plan& plan : plans) {
    for (const RowRun& run : plan.runs) {
      for (std::uint64_t piece = 0; piece < run.count; ++piece) {
        for (std::uint64_t row = 0; row < run.rows; ++row) {
          sum +=
              (run.src_row + piece * run.src_step + row + 1) * (run.dst_row + piece * run.dst_step + row + 7);
        }
      }
    }
  }
  return sum;
}

/// Runs plan_numpy.py with the first interpreter that has NumPy: KVF_PYTHON, python3, or the system's (which
/// has the Debian package); an empty object when none has.
nlohmann::json run_numpy() {
  const char* chosen = std::getenv("KVF_PYTHON");
  for (const std::string& python :
       {std::string(chosen != nullptr ? chosen : "python3"), std::string("/usr/bin/python3")}) {
    const std::string command = python + " '" KVF_BENCH_DIR "/plan_numpy.py'";
    std::string output;
    if (FILE* pipe = ::popen(command.c_str(), "r")) {
      char part[256];
      while (std::fgets(part, sizeof part, pipe) != nullptr) {
        output += part;
      }
      ::pclose(pipe);
    }
    nlohmann::json parsed = nlohmann::json::parse(output, nullptr, false);
    if (parsed.is_object()) {
      return parsed;
    }
  }
  return nlohmann::json::object();
}

/// Runs that continue the one before at the destination need no write of their own.
std::uint64_t destination_stretches(const Plan& plan) {
  std::uint64_t stretches = 0;
  std::uint64_t next = ~std::uint64_t{0};
  for (const RowRun& run : plan.runs) {
    const bool is_dense = run.dst_step == run.rows;
    stretches += is_dense ? (run.dst_row == next ? 0 : 1) : run.count;
    next = run.dst_row + std::uint64_t{run.count - 1} * run.dst_step + run.rows;
  }
  return stretches;
}

/// The row of the million tokens; `right` turns false when the plans do not cover them.
nlohmann::ordered_json million(bool& right) {
  constexpr std::uint32_t kLayers = 61;
  const Request request = make_request(kMillion, kLayers, 2);
  const std::vector<Plan> plans = plan_all(request);
  const Memory memory = memory_of(plans);
  std::uint64_t rows = 0;
  std::uint64_t copies = 0;
  std::uint64_t writes = 0;
  for (const Plan& plan : plans) {
    rows += plan.rows;
    copies += plan.runs.size() * plan.pairs.size();
    writes += destination_stretches(plan) * plan.pairs.size();
  }
  right = right && rows == kMillion && plans.size() == kRanks;
  const std::uint64_t per_token = std::uint64_t{kMillion} * kLayers;
  return {
      {"tokens", kMillion},
      {"layers", kLayers},
      {"plans", plans.size()},
      {"plan_seconds", median_seconds(request)},
      {"runs", memory.runs},
      {"plan_bytes", memory.run_bytes + memory.pair_bytes},
      {"strided_copies", copies},     // one per run and layer: what shm makes
      {"contiguous_writes", writes},  // gathered at the source: what puts make
      {"writes_per_token_and_layer", per_token},
      {"strided_copies_ratio", static_cast<double>(per_token) / static_cast<double>(copies)},
      {"contiguous_writes_ratio", static_cast<double>(per_token) / static_cast<double>(writes)},
  };
}

int run(bool numpy) {
  const Request deep = make_request(kTokens, 61, 1);
  const std::vector<Plan> plans = plan_all(deep);
  const Memory memory = memory_of(plans);
  const Memory shallow = memory_of(plan_all(make_request(kTokens, 1, 1)));
  const std::uint64_t sum = checksum(plans);
  const double seconds = median_seconds(deep);
  nlohmann::ordered_json out{
      {"tokens", kTokens},
      {"layers", 61},
      {"decode_ranks", kRanks},
      {"plan_seconds", seconds},
      {"runs", memory.runs},
      {"run_bytes_61_layers", memory.run_bytes},
      {"run_bytes_1_layer", shallow.run_bytes},
      {"pair_bytes_61_layers", memory.pair_bytes},
      {"pair_bytes_1_layer", shallow.pair_bytes},
      {"bytes", std::accumulate(plans.begin(), plans.end(), std::uint64_t{0},
                                [](std::uint64_t total, const Plan& plan) { return total + plan.bytes; })},
      {"checksum", sum},
  };
  bool right = memory.run_bytes == shallow.run_bytes;
  out["million"] = million(right);
  if (numpy) {
    const nlohmann::json other = run_numpy();
    if (other.empty()) {
      std::fprintf(stderr,
                   "plan_bench: no Python with NumPy; install python3-numpy or name one with KVF_PYTHON\n");
      return 1;
    }
    right = right && other.value("checksum", std::uint64_t{0}) == sum;
    out["numpy"] = other;
    out["ratio"] = other.value("seconds", 0.0) / seconds;
    out["ratio_blocks"] = other.value("seconds_blocks", 0.0) / seconds;
  }
  std::printf("%s\n", out.dump(2).c_str());
  return right ? 0 : 1;
}

}  // namespace
}  // namespace kvferry

int main(int argc, char** argv) {
  const bool numpy = argc == 2 && std::strcmp(argv[1], "--numpy") == 0;
  if (argc > 1 && !numpy) {
    std::fprintf(stderr, "usage: plan_bench [--numpy]\n");
    return 2;
  }
  return kvferry::run(numpy);
}
