// The work done per chunk, block and message, with fixed inputs, so that tests/bench/instructions.py can
// count its instructions: only what runs inside kvf_hot_section() is counted.
//
//   hot_paths --list      the names of the paths, one a line
//   hot_paths --machine   what the counts depend on beside our code, one a line
//   hot_paths PATH        runs that path and prints a checksum over what it produced
//
// The request is the one of plan_bench: 131,072 tokens, page 64, DCP 1 -> 8, scattered pages; blocks, grants
// and copies are those of decode rank 0. One layer: the work per layer is the same.

#include <fcntl.h>
#include <gnu/libc-version.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/base/check.h"
#include "common/control/messages.h"
#include "common/plan/plan.h"
#include "common/pool/pool.h"
#include "kernels/copy.h"
#include "tests/support/rng.h"
#include "transport/block.h"
#include "transport/block_cutter.h"
#include "transport/grant_table.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

/// The counter is switched on and off by this name.
extern "C" __attribute__((noinline)) std::uint64_t kvf_hot_section(
    const std::function<std::uint64_t()>& body) {
  return body();
}

namespace kvferry {
namespace {

constexpr std::uint32_t kTokens = 131072;
constexpr std::uint32_t kPage = 64;
constexpr std::uint32_t kRanks = 8;
constexpr std::uint32_t kRowBytes = 1152;
constexpr std::uint32_t kSrcPages = kTokens / kPage;
constexpr std::uint32_t kDstPages = kSrcPages / kRanks;
constexpr PeerId kPeer = 7;
// 56 rows a block: enough blocks for their own work to be seen beside that of their rows.
constexpr CutLimits kLimits{.payload_bytes_max = 64 << 10, .spans_max = 1000};

std::uint64_t mix(std::uint64_t sum, std::uint64_t value) {
  return (sum ^ value) * 0x9E3779B97F4A7C15ull + (sum >> 29);
}

struct Request {
  std::vector<PairLayout> layouts;  // of each decode rank
  std::vector<std::uint32_t> src = test::shuffled_pages(kSrcPages, 1);
  std::vector<std::uint32_t> dst = test::shuffled_pages(kDstPages, 2);

  Request() {
    ModelGeometry model = *preset_geometry("deepseek-v3");
    model.hidden_layers = 1;
    model.kv_layers.resize(1);
    const Topology prefill;
    Topology decode;
    decode.tp = decode.dcp = kRanks;
    const RankShape from{prefill, prefill.coord(0), kPage,
                         rank_buffers(model, prefill, prefill.coord(0), kSrcPages)};
    for (RankIndex rank = 0; rank < kRanks; ++rank) {
      const RankCoord to = decode.coord(rank);
      layouts.push_back(
          *pair_layout(model, from, {decode, to, kPage, rank_buffers(model, decode, to, kDstPages)}));
    }
  }

  Plan plan(RankIndex rank) const { return *plan_chunk(layouts[rank], {0, kTokens, 0, 0, src, dst}); }
};

std::shared_ptr<Pool> make_pool(std::uint32_t pages) {
  PoolLayout layout;
  layout.page_size = kPage;
  layout.buffers.push_back({.shape = {0, BufferKind::kLatent, kRowBytes, pages}});
  std::vector<UniqueFd> fds;
  fds.emplace_back(::memfd_create("kvferry-hot-paths", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  KVF_CHECK(::ftruncate(fds[0].get(), static_cast<off_t>(pages) * kPage * kRowBytes) == 0);
  KVF_CHECK(::fcntl(fds[0].get(), F_ADD_SEALS, F_SEAL_SHRINK) == 0);
  return *Pool::map(std::move(layout), std::move(fds));
}

ChunkJob make_job(const Request& request) {
  ChunkJob job;
  job.key = {.grant = {.room = 4711, .generation = 1, .decode_rank = 0}, .prefill_rank = 0};
  job.plan = std::make_shared<const Plan>(request.plan(0));
  job.source = make_pool(kSrcPages);
  job.last = true;
  KVF_CHECK(check_job(job).has_value());
  return job;
}

std::vector<BlockHeader> cut_headers(const ChunkJob& job) {
  std::vector<BlockHeader> headers;
  BlockCutter cutter(job, kLimits);
  for (CutBlock block; cutter.next(block);) {
    headers.push_back(block.header);
  }
  return headers;
}

std::uint64_t plan_path() {
  const Request request;
  return kvf_hot_section([&] {
    std::uint64_t sum = 0;
    for (RankIndex rank = 0; rank < kRanks; ++rank) {
      const Plan plan = request.plan(rank);
      sum = mix(mix(sum, plan.runs.size()), mix(plan.rows, plan.runs.back().src_row));
    }
    return sum;
  });
}

std::uint64_t cut_path() {
  const Request request;
  const ChunkJob job = make_job(request);
  return kvf_hot_section([&] {
    std::uint64_t sum = 0;
    BlockCutter cutter(job, kLimits);
    for (CutBlock block; cutter.next(block);) {
      sum = mix(mix(sum, block.header.dst_index), block.spans.size());
    }
    return mix(mix(sum, cutter.bytes()), cutter.blocks());
  });
}

std::uint64_t grant_path() {
  const Request request;
  const ChunkJob job = make_job(request);
  const std::vector<BlockHeader> headers = cut_headers(job);
  const auto pool = make_pool(kDstPages);
  GrantTable table;
  table.add_pool(pool);
  Grant grant;
  grant.key = job.key.grant;
  grant.pages = std::make_shared<const std::vector<std::uint32_t>>(request.dst);
  grant.sources = {{0, kPeer}};
  const BlockHeader notice = make_notice(job.key, job.plan->bytes, headers.size());
  return kvf_hot_section([&] {
    KVF_CHECK(table.open(grant).has_value());
    std::uint64_t sum = 0;
    for (const BlockHeader& header : headers) {
      Placement placement = *table.admit(header, kPeer);
      for (auto span = placement.next(); !span.empty(); span = placement.next()) {
        sum = mix(sum, span.size());
      }
      KVF_CHECK(!table.arrived(header, kPeer)->has_value());
    }
    const auto landed = table.notice(notice, kPeer);
    KVF_CHECK(landed.has_value() && landed->has_value() && table.close(grant.key));
    return mix(sum, (*landed)->bytes);
  });
}

std::uint64_t block_path() {
  const Request request;
  const std::vector<BlockHeader> headers = cut_headers(make_job(request));
  return kvf_hot_section([&] {
    std::uint64_t sum = 0;
    BlockBytes bytes;
    for (const BlockHeader& header : headers) {
      encode_block(header, bytes);
      sum = mix(sum, decode_block(bytes)->dst_index);
    }
    return sum;
  });
}

std::uint64_t control_path() {
  const Request request;
  const GrantKey key{.room = 4711, .generation = 1, .decode_rank = 0};
  const std::vector<ControlMessage> messages{
      message::Grant{.key = key, .targets = {0, 1}, .pages = request.dst, .tokens = kTokens, .verify = 16},
      message::Stop{.key = key, .targets = {0, 1}, .code = Code::kDeadline, .reason = "too late"},
      message::Landed{.key = key},
      message::TransferFailed{.key = {key, 0}, .code = Code::kTransport, .reason = "connection reset"},
      message::TransferDrained{.key = {key, 0}},
      message::Heartbeat{.sequence = 12345},
  };
  return kvf_hot_section([&] {
    std::uint64_t sum = 0;
    for (const ControlMessage& message : messages) {
      const std::string bytes = encode(message);
      sum = mix(mix(sum, bytes.size()), decode_control(bytes)->index());
    }
    return sum;
  });
}

/// The variant that most hosts without AVX-512 take: valgrind has no AVX-512, so copy_run() itself would be
/// counted in whatever variant the host has besides.
std::uint64_t copy_path() {
  const Request request;
  const Plan plan = request.plan(0);
  const auto source = make_pool(kSrcPages);
  const auto target = make_pool(kDstPages);
  std::byte* const src = source->buffer(0).data();
  std::byte* const dst = target->buffer(0).data();
  for (std::uint64_t at = 0; at < source->buffer(0).size(); at += kRowBytes) {
    std::memcpy(src + at, &at, sizeof at);
  }
  return kvf_hot_section([&] {
    for (const RowRun& run : plan.runs) {
      copy_run_with(CopyVariant::kAvx2, dst + run.dst_row * kRowBytes, src + run.src_row * kRowBytes,
                    std::size_t{run.rows} * kRowBytes, run.count, std::size_t{run.dst_step} * kRowBytes,
                    std::size_t{run.src_step} * kRowBytes);
    }
    copy_fence();
    std::uint64_t sum = 0;
    for (std::uint64_t at = 0; at < target->buffer(0).size(); at += std::uint64_t{kPage} * kRowBytes) {
      std::uint64_t value = 0;
      std::memcpy(&value, dst + at, sizeof value);
      sum = mix(sum, value);
    }
    return sum;
  });
}

using Path = std::pair<const char*, std::uint64_t (*)()>;
constexpr Path kPaths[] = {
    {"plan", plan_path},   {"cut", cut_path},         {"grant", grant_path},
    {"block", block_path}, {"control", control_path}, {"copy", copy_path},
};

void print_machine() {
  std::printf("compiler %s\n", __VERSION__);
  std::printf("libc %s\n", ::gnu_get_libc_version());
#if defined(__x86_64__)
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  char vendor[13] = {};
  __get_cpuid(0, &a, &b, &c, &d);
  std::memcpy(vendor, &b, 4);
  std::memcpy(vendor + 4, &d, 4);
  std::memcpy(vendor + 8, &c, 4);
  std::string features;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) != 0) {
    features += (b & bit_AVX2) != 0 ? " avx2" : "";
    features += (b & bit_BMI2) != 0 ? " bmi2" : "";
    features += (b & (1u << 9)) != 0 ? " erms" : "";
    features += (d & (1u << 4)) != 0 ? " fsrm" : "";
  }
  std::printf("cpu %s%s\n", vendor, features.c_str());
#else
  std::printf("cpu other\n");
#endif
  const auto variants = copy_variants();
  const bool avx2 = std::find(variants.begin(), variants.end(), CopyVariant::kAvx2) != variants.end();
  std::printf("copy %s\n", avx2 ? "avx2" : "portable");
}

int run(const std::string& name) {
  if (name == "--list") {
    for (const auto& [path, function] : kPaths) {
      std::printf("%s\n", path);
    }
    return 0;
  }
  if (name == "--machine") {
    print_machine();
    return 0;
  }
  for (const auto& [path, function] : kPaths) {
    if (name == path) {
      std::printf("checksum %016llx\n", static_cast<unsigned long long>(function()));
      return 0;
    }
  }
  std::fprintf(stderr, "hot_paths: no path '%s'\n", name.c_str());
  return 2;
}

}  // namespace
}  // namespace kvferry

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: hot_paths --list | --machine | PATH\n");
    return 2;
  }
  return kvferry::run(argv[1]);
}
