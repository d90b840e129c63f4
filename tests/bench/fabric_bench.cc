// The fabrics alone, without daemons: one process sends, a second one receives, over pools larger than the
// caches, with scattered pages. Each round copies the same rows with memcpy and with the production copy,
// then sends them over the fabric; what is printed are ratios to those copies in the same round. For finding
// out where the time goes; `kvferry bench` measures what users get.
//
//   fabric_bench shm|tcp|ucx-shm|ucx-tcp [same|dcp4] [pages] [layers] [rounds] [threads or streams]
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "common/base/check.h"
#include "common/base/clock.h"
#include "common/topology/rank_map.h"
#include "kernels/copy.h"
#include "tests/support/rng.h"
#include "transport/shm/receive_fabric.h"
#include "transport/shm/send_fabric.h"
#include "transport/tcp/tcp_receive_fabric.h"
#include "transport/tcp/tcp_send_fabric.h"
#ifdef KVF_HAVE_UCX
#include "transport/ucx/receive_fabric.h"
#include "transport/ucx/send_fabric.h"
#endif

namespace kvferry {
namespace {

constexpr std::uint32_t kPageSize = 64;
constexpr PeerId kPeer = 1;

struct Options {
  std::string fabric = "tcp";
  std::string layout = "same";
  std::uint32_t pages = 128;
  std::uint32_t layers = 61;
  int rounds = 7;
  std::uint32_t threads = 0;
};

std::shared_ptr<Pool> make_pool(RankIndex rank, const std::vector<BufferShape>& shapes) {
  PoolLayout layout;
  layout.rank = rank;
  layout.page_size = kPageSize;
  std::uint64_t bytes = 0;
  for (const BufferShape& shape : shapes) {
    layout.buffers.push_back(BufferPlace{shape, 0, bytes});
    bytes += shape.pages * kPageSize * shape.row_bytes;
  }
  std::vector<UniqueFd> fds;
  fds.emplace_back(::memfd_create("kvferry-bench", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  KVF_CHECK(::ftruncate(fds[0].get(), static_cast<off_t>(bytes)) == 0);
  KVF_CHECK(::fcntl(fds[0].get(), F_ADD_SEALS, F_SEAL_SHRINK) == 0);
  auto pool = Pool::map(std::move(layout), std::move(fds));
  KVF_CHECK(pool.has_value());
  return *pool;
}

/// Pools of both sides and the plans of one room into every decode rank.
struct Work {
  std::shared_ptr<Pool> source;
  std::vector<std::shared_ptr<Pool>> destinations;
  std::vector<std::shared_ptr<const Plan>> plans;
  std::vector<Grant::Pages> granted;
  std::uint64_t bytes = 0;
};

Work make_work(const Options& options) {
  ModelGeometry model = *preset_geometry("deepseek-v3");
  model.hidden_layers = options.layers;
  model.kv_layers.resize(options.layers);
  Topology prefill;
  Topology decode;
  if (options.layout == "dcp4") {
    decode.tp = decode.dcp = 4;
  }
  const std::uint32_t ranks = decode.rank_count();
  const std::uint32_t tokens = options.pages * kPageSize;
  const std::uint32_t dst_pages = (options.pages + ranks - 1) / ranks;
  Work work;
  const RankShape src{prefill, prefill.coord(0), kPageSize,
                      rank_buffers(model, prefill, prefill.coord(0), 2 * options.pages)};
  work.source = make_pool(0, src.buffers);
  const auto src_pages = test::shuffled_pages(2 * options.pages, 1);
  for (RankIndex rank = 0; rank < ranks; ++rank) {
    const RankShape dst{decode, decode.coord(rank), kPageSize,
                        rank_buffers(model, decode, decode.coord(rank), 2 * dst_pages)};
    work.destinations.push_back(make_pool(rank, dst.buffers));
    auto pages = test::shuffled_pages(2 * dst_pages, 2 + rank);
    pages.resize(dst_pages);
    const PairLayout layout = *pair_layout(model, src, dst);
    work.plans.push_back(std::make_shared<const Plan>(*plan_chunk(
        layout, {0, tokens, 0, 0, std::span(src_pages).first(options.pages), pages, {0, tokens}})));
    work.granted.push_back(std::make_shared<const std::vector<std::uint32_t>>(std::move(pages)));
    work.bytes += work.plans.back()->bytes;
  }
  for (std::uint32_t b = 0; b < work.source->buffer_count(); ++b) {
    test::Rng rng(b + 1);
    auto bytes = work.source->buffer(b);
    for (std::size_t at = 0; at + 8 <= bytes.size(); at += 8) {
      const std::uint64_t value = rng.next();
      std::memcpy(bytes.data() + at, &value, 8);
    }
  }
  return work;
}

using Each =
    std::function<void(std::byte* dst, const std::byte* src, const BufferPair& pair, const RowRun& run)>;

void for_runs(const Work& work, std::uint32_t part, std::uint32_t parts, const Each& each) {
  for (std::size_t i = 0; i < work.plans.size(); ++i) {
    const Plan& plan = *work.plans[i];
    for (std::size_t p = part; p < plan.pairs.size(); p += parts) {
      const BufferPair& pair = plan.pairs[p];
      for (const RowRun& run : plan.runs) {
        each(work.destinations[i]->buffer(pair.dst_buffer).data() + run.dst_row * pair.dst_row_bytes,
             work.source->buffer(pair.src_buffer).data() + run.src_row * pair.src_row_bytes, pair, run);
      }
    }
  }
}

double copy_seconds(const Work& work, CopyVariant variant, std::uint32_t threads) {
  const Nanos start = steady_now();
  std::vector<std::thread> crew;
  for (std::uint32_t part = 0; part < threads; ++part) {
    crew.emplace_back([&, part] {
      for_runs(work, part, threads,
               [&](std::byte* dst, const std::byte* src, const BufferPair& pair, const RowRun& run) {
                 copy_run_with(variant, dst, src, std::size_t{pair.bytes} * run.rows, run.count,
                               std::size_t{run.dst_step} * pair.dst_row_bytes,
                               std::size_t{run.src_step} * pair.src_row_bytes);
               });
      copy_fence();
    });
  }
  for (std::thread& thread : crew) {
    thread.join();
  }
  return static_cast<double>(steady_now() - start) / 1e9;
}

std::uint64_t wrong_pieces(const Work& work) {
  std::uint64_t wrong = 0;
  for_runs(work, 0, 1, [&](std::byte* dst, const std::byte* src, const BufferPair& pair, const RowRun& run) {
    for (std::uint32_t k = 0; k < run.count; ++k) {
      wrong += std::memcmp(dst + std::size_t{k} * run.dst_step * pair.dst_row_bytes,
                           src + std::size_t{k} * run.src_step * pair.src_row_bytes,
                           std::size_t{pair.bytes} * run.rows) != 0;
    }
  });
  return wrong;
}

void poison(const Work& work) {
  for (const auto& pool : work.destinations) {
    for (std::uint32_t b = 0; b < pool->buffer_count(); ++b) {
      std::memset(pool->buffer(b).data(), 0xEE, pool->buffer(b).size());
    }
  }
}

GrantKey grant_key(std::uint64_t round, RankIndex rank) {
  return GrantKey{7, round, rank};
}

#ifdef KVF_HAVE_UCX
UcxOptions ucx_options(const Options& options) {
  UcxOptions ucx;
  ucx.transports = options.fabric == "ucx-tcp" ? UcxTransports::kTcp : UcxTransports::kShm;
  return ucx;
}
#endif

std::unique_ptr<ReceiveFabric> open_receive(const Options& options, const std::string& folder,
                                            FabricSink sink) {
  if (options.fabric == "shm") {
    ShmReceiveOptions shm;
    shm.path = folder + "/shm.sock";
    return *ShmReceiveFabric::create(shm, std::move(sink));
  }
  if (options.fabric == "tcp") {
    return *TcpReceiveFabric::create({}, std::move(sink));
  }
#ifdef KVF_HAVE_UCX
  return *UcxReceiveFabric::create(ucx_options(options), std::move(sink));
#else
  return nullptr;
#endif
}

std::unique_ptr<SendFabric> open_send(const Options& options, FabricSink sink) {
  if (options.fabric == "shm") {
    ShmSendOptions shm;
    shm.copy_threads = std::max(1u, options.threads);
    return *ShmSendFabric::create(shm, std::move(sink));
  }
  if (options.fabric == "tcp") {
    TcpSendConfig tcp;
    tcp.streams = options.threads == 0 ? tcp.streams : options.threads;
    return *TcpSendFabric::create(tcp, std::move(sink));
  }
#ifdef KVF_HAVE_UCX
  return *UcxSendFabric::create(ucx_options(options), std::move(sink));
#else
  return nullptr;
#endif
}

void write_all(int fd, const void* data, std::size_t bytes) {
  KVF_CHECK(::write(fd, data, bytes) == static_cast<ssize_t>(bytes));
}
void read_all(int fd, void* data, std::size_t bytes) {
  std::size_t have = 0;
  while (have < bytes) {
    const ssize_t got = ::read(fd, static_cast<char*>(data) + have, bytes - have);
    KVF_CHECK(got > 0);
    have += static_cast<std::size_t>(got);
  }
}

double cpu_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
}

/// Opens grants for each round number that comes; answers 'g', then one 'l' per landed source and its CPU
/// time.
[[noreturn]] void receiver(const Options& options, const Work& work, const std::string& folder, int in,
                           int out) {
  auto fabric = open_receive(options, folder, [&](FabricEvent&& event) {
    if (std::holds_alternative<fabric_event::Landed>(event)) {
      write_all(out, "l", 1);
    } else if (const auto* rejected = std::get_if<fabric_event::Rejected>(&event)) {
      std::fprintf(stderr, "rejected: %s\n", rejected->error.message.c_str());
    } else if (const auto* down = std::get_if<fabric_event::PeerDown>(&event)) {
      std::fprintf(stderr, "receiver: down: %s\n", down->error.message.c_str());
    }
  });
  for (const auto& pool : work.destinations) {
    fabric->add_pool(pool);
  }
  const FabricOffer offer = *fabric->offer(kPeer);
  const std::size_t size = offer.json.size();
  write_all(out, &size, sizeof size);
  write_all(out, offer.json.data(), size);
  std::uint64_t round = 0;
  while (::read(in, &round, sizeof round) == sizeof round) {
    if (round == 0) {
      const double cpu = cpu_seconds();
      write_all(out, &cpu, sizeof cpu);
      continue;
    }
    for (RankIndex rank = 0; rank < work.destinations.size(); ++rank) {
      if (round > 1) {
        fabric->close(grant_key(round - 1, rank));
      }
      Grant grant;
      grant.key = grant_key(round, rank);
      grant.pages = work.granted[rank];
      grant.sources.emplace_back(0, kPeer);
      fabric->open(grant);
    }
    write_all(out, "g", 1);
  }
  fabric.reset();
  ::_exit(0);
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

int run(const Options& options) {
  const Work work = make_work(options);
  std::string folder = "/tmp/kvferry-bench-XXXXXX";
  KVF_CHECK(::mkdtemp(folder.data()) != nullptr);
  int to[2];
  int from[2];
  KVF_CHECK(::pipe(to) == 0 && ::pipe(from) == 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(to[1]);
    ::close(from[0]);
    receiver(options, work, folder, to[0], from[1]);
  }
  ::close(to[0]);
  ::close(from[1]);
  std::size_t size = 0;
  read_all(from[0], &size, sizeof size);
  FabricOffer offer{options.fabric == "shm"   ? FabricKind::kShm
                    : options.fabric == "tcp" ? FabricKind::kTcp
                                              : FabricKind::kUcx,
                    std::string(size, ' ')};
  read_all(from[0], offer.json.data(), size);
  int up[2];
  KVF_CHECK(::pipe(up) == 0);
  auto fabric = open_send(options, [&](FabricEvent&& event) {
    if (std::holds_alternative<fabric_event::PeerUp>(event)) {
      write_all(up[1], "u", 1);
    } else if (const auto* down = std::get_if<fabric_event::PeerDown>(&event)) {
      std::fprintf(stderr, "sender: down: %s\n", down->error.message.c_str());
    } else if (const auto* failed = std::get_if<fabric_event::ChunkFailed>(&event)) {
      std::fprintf(stderr, "chunk failed: %s\n", failed->error.message.c_str());
    }
  });
  fabric->connect(kPeer, offer);
  char byte = 0;
  read_all(up[0], &byte, 1);
  const CopyVariant best = copy_variants().front();
  std::vector<double> to_memcpy, to_nt1, to_nt2, gbs, memcpy_gbs, cpu;
  std::uint64_t wrong = 0;
  for (int round = 1; round <= options.rounds; ++round) {
    const double plain_before = copy_seconds(work, CopyVariant::kPortable, 1);
    const double nt1 = copy_seconds(work, best, 1);
    const double nt2 = copy_seconds(work, best, 2);
    poison(work);
    const auto receiver_cpu = [&] {
      const std::uint64_t ask = 0;
      write_all(to[1], &ask, sizeof ask);
      double seconds = 0;
      read_all(from[0], &seconds, sizeof seconds);
      return seconds;
    };
    const double cpu_before = cpu_seconds() + receiver_cpu();
    const auto number = static_cast<std::uint64_t>(round);
    write_all(to[1], &number, sizeof number);
    read_all(from[0], &byte, 1);
    const Nanos start = steady_now();
    for (RankIndex rank = 0; rank < work.plans.size(); ++rank) {
      ChunkJob job;
      job.key = TransferKey{grant_key(number, rank), 0};
      job.plan = work.plans[rank];
      job.source = work.source;
      job.last = true;
      fabric->post(kPeer, std::move(job));
    }
    for (std::size_t i = 0; i < work.plans.size(); ++i) {
      read_all(from[0], &byte, 1);
    }
    const double seconds = static_cast<double>(steady_now() - start) / 1e9;
    const double cpu_after = cpu_seconds() + receiver_cpu();
    wrong += wrong_pieces(work);
    const double plain_after = copy_seconds(work, CopyVariant::kPortable, 1);
    if (round == 1) {
      continue;  // page tables, branch predictors, connection windows
    }
    const double plain = (plain_before + plain_after) / 2;
    const auto gb = static_cast<double>(work.bytes) / 1e9;
    to_memcpy.push_back(plain / seconds);
    to_nt1.push_back(nt1 / seconds);
    to_nt2.push_back(nt2 / seconds);
    gbs.push_back(gb / seconds);
    memcpy_gbs.push_back(gb / plain);
    cpu.push_back((cpu_after - cpu_before) / gb);
  }
  std::printf(
      "%-8s %-5s %6.0f MB  %5.2f GB/s  memcpy %5.2f GB/s  ratio to memcpy %.2f (%.2f..%.2f)  NT %.2f  2 NT "
      "%.2f  CPU %.2f s/GB  wrong %llu\n",
      options.fabric.c_str(), options.layout.c_str(), static_cast<double>(work.bytes) / 1e6, median(gbs),
      median(memcpy_gbs), median(to_memcpy), *std::min_element(to_memcpy.begin(), to_memcpy.end()),
      *std::max_element(to_memcpy.begin(), to_memcpy.end()), median(to_nt1), median(to_nt2), median(cpu),
      static_cast<unsigned long long>(wrong));
  fabric.reset();
  ::close(to[1]);
  int status = 0;
  ::waitpid(child, &status, 0);
  ::unlink((folder + "/shm.sock").c_str());
  ::rmdir(folder.c_str());
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace kvferry

int main(int argc, char** argv) {
  ::signal(SIGPIPE, SIG_IGN);
  kvferry::Options options;
  const auto text = [&](int i, const std::string& other) { return argc > i ? std::string(argv[i]) : other; };
  const auto number = [&](int i, long other) { return argc > i ? std::strtol(argv[i], nullptr, 10) : other; };
  options.fabric = text(1, options.fabric);
  options.layout = text(2, options.layout);
  options.pages = static_cast<std::uint32_t>(number(3, options.pages));
  options.layers = static_cast<std::uint32_t>(number(4, options.layers));
  options.rounds = static_cast<int>(number(5, options.rounds));
  options.threads = static_cast<std::uint32_t>(number(6, options.threads));
  const bool known = options.fabric == "shm" || options.fabric == "tcp" || options.fabric == "ucx-shm" ||
                     options.fabric == "ucx-tcp";
  if (!known || (options.layout != "same" && options.layout != "dcp4") || options.pages == 0 ||
      options.layers == 0 || options.layers > 61 || options.rounds < 2) {
    std::fprintf(stderr,
                 "usage: fabric_bench shm|tcp|ucx-shm|ucx-tcp [same|dcp4] [pages] [layers 1..61] [rounds, 2 "
                 "or more] [threads or streams]\n");
    return 2;
  }
  return kvferry::run(options);
}
