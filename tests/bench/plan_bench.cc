// How long it takes to plan a long request: 131,072 tokens of a 61-layer MLA model, page 64, prefill DCP 1 ->
// decode DCP 8, all eight decode ranks, scattered pages. Prints one JSON object. With --numpy it also runs
// plan_numpy.py (the per-token method) beside this source and prints the ratio; the checksums over all
// (source row, destination row) must agree. Exit status 1 when they do not, or when the plan depends on the
// layer count.

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
#include "tests/support/rng.h"

namespace kvferry {
namespace {

constexpr std::uint32_t kTokens = 131072;
constexpr std::uint32_t kPage = 64;
constexpr std::uint32_t kRanks = 8;

std::vector<std::uint32_t> shuffled_pages(std::uint32_t count, std::uint64_t seed) {
  std::vector<std::uint32_t> pages(count);
  std::iota(pages.begin(), pages.end(), 0u);
  test::Rng(seed).shuffle(pages);
  return pages;
}

std::vector<PairLayout> layouts(std::uint32_t layers) {
  ModelGeometry model = *preset_geometry("deepseek-v3");
  model.hidden_layers = layers;
  model.kv_layers.resize(layers);
  const Topology prefill;
  Topology decode;
  decode.tp = decode.dcp = kRanks;
  const RankShape src{prefill, {}, kPage, rank_buffers(model, prefill, {}, kTokens / kPage)};
  std::vector<PairLayout> all;
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    const RankCoord coord{rank, 0, 0, 0};
    const RankShape dst{decode, coord, kPage, rank_buffers(model, decode, coord, kTokens / kPage / kRanks)};
    all.push_back(*pair_layout(model, src, dst));
  }
  return all;
}

std::vector<Plan> plan_all(const std::vector<PairLayout>& all, const std::vector<std::uint32_t>& src,
                           const std::vector<std::uint32_t>& dst) {
  std::vector<Plan> plans;
  plans.reserve(all.size());
  for (const PairLayout& layout : all) {
    plans.push_back(*plan_chunk(layout, {0, kTokens, 0, 0, src, dst}));
  }
  return plans;
}

double median_seconds(const std::vector<PairLayout>& all, const std::vector<std::uint32_t>& src,
                      const std::vector<std::uint32_t>& dst) {
  std::vector<double> seconds;
  for (int i = 0; i < 501; ++i) {
    const auto start = std::chrono::steady_clock::now();
    const std::vector<Plan> plans = plan_all(all, src, dst);
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

/// Runs plan_numpy.py with the interpreter KVF_PYTHON (default python3); an empty object when that prints
/// none.
nlohmann::json run_numpy(const std::string& script) {
  const char* python = std::getenv("KVF_PYTHON");
  const std::string command = std::string(python != nullptr ? python : "python3") + " '" + script + "'";
  std::string output;
  if (FILE* pipe = ::popen(command.c_str(), "r")) {
    char part[256];
    while (std::fgets(part, sizeof part, pipe) != nullptr) {
      output += part;
    }
    ::pclose(pipe);
  }
  nlohmann::json parsed = nlohmann::json::parse(output, nullptr, false);
  return parsed.is_object() ? parsed : nlohmann::json::object();
}

int run(bool numpy) {
  const std::vector<std::uint32_t> src = shuffled_pages(kTokens / kPage, 1);
  const std::vector<std::uint32_t> dst = shuffled_pages(kTokens / kPage / kRanks, 2);
  const std::vector<PairLayout> deep = layouts(61);
  const std::vector<Plan> plans = plan_all(deep, src, dst);
  const Memory memory = memory_of(plans);
  const Memory shallow = memory_of(plan_all(layouts(1), src, dst));
  const std::uint64_t sum = checksum(plans);
  const double seconds = median_seconds(deep, src, dst);
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
  if (numpy) {
    const std::string here = __FILE__;
    const nlohmann::json other = run_numpy(here.substr(0, here.rfind('/') + 1) + "plan_numpy.py");
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
