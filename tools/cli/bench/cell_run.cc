#include "tools/cli/bench/cell_run.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "tools/cli/bench/scrape.h"
#include "tools/cli/demo/demo_results.h"

namespace kvferry {
namespace {

using std::chrono::steady_clock;

constexpr const char* kWrites = "kvferry_transfer_writes_total";

/// What lands beside the rows of a room: its aux row on each decode rank.
std::uint64_t aux_bytes(const BenchSide& decode) {
  std::uint64_t row = 0;
  for (const AuxFieldShape& field : kAuxSchema) {
    row += field.width;
  }
  return row * decode.ranks().size();
}

/// Sample by sample.
Spread quotients(const std::vector<double>& above, const std::vector<double>& below) {
  std::vector<double> out;
  for (std::size_t i = 0; i < above.size(); ++i) {
    out.push_back(below[i] > 0 ? above[i] / below[i] : 0);
  }
  return spread(std::move(out));
}

}  // namespace

CellRun::CellRun(const CellContext& context, const BenchCell& cell, std::uint32_t waves)
    : context_(context), cell_(cell), waves_(waves), rooms_(place_rooms(context.layout, cell, waves)) {}

Result<void> CellRun::run(CellResult& result) {
  KVF_TRY(const CopyList list, CopyList::create(context_.layout, context_.prefill, context_.decode, rooms_));
  context_.prefill.fill(rooms_);
  std::vector<Samples> samples(context_.links.size());
  KVF_TRY_VOID(memcpy_turn(list, false));
  for (std::uint32_t round = 0; round <= context_.rounds; ++round) {
    const bool counts = round > 0;
    for (std::size_t i = 0; i < samples.size(); ++i) {
      const double before = last_memcpy_;
      KVF_TRY_VOID(fabric_turn(*context_.links[i], list, counts, samples[i]));
      KVF_TRY_VOID(memcpy_turn(list, counts));
      if (counts) {
        samples[i].to_memcpy.push_back(samples[i].rates.back() / harmonic_mean(before, last_memcpy_));
      }
    }
    KVF_TRY_VOID(kernel_turn(list, counts));
  }
  result.waves = waves_;
  result.round_bytes = list.bytes();
  result.pieces = list.pieces();
  result.memcpy = spread(copies_.memcpy);
  result.kernel = spread(copies_.kernel);
  result.kernels = spread(copies_.kernels);
  result.kernel_to_memcpy = spread(copies_.kernel_to_memcpy);
  result.kernels_to_memcpy = spread(copies_.kernels_to_memcpy);
  for (std::size_t i = 0; i < samples.size(); ++i) {
    result.fabrics.push_back(conclude(context_.links[i]->fabric(), samples[i]));
  }
  return {};
}

Result<void> CellRun::fabric_turn(BenchLink& link, const CopyList& list, bool counts, Samples& samples) {
  if (cell_.beside > 0) {
    KVF_TRY_VOID(waves_turn(link, list, counts, true, samples));
  }
  return waves_turn(link, list, counts, false, samples);
}

Result<void> CellRun::waves_turn(BenchLink& link, const CopyList& list, bool counts, bool alone,
                                 Samples& samples) {
  KVF_TRY_VOID(link.cluster().check_daemons());
  context_.decode.poison(rooms_);
  KVF_TRY(const double writes_before, scrape_counter(link.cluster().metrics(Side::kPrefill), kWrites));
  const std::size_t large = cell_.beside > 0 ? 1 : 0;  // rooms of a wave that are not of the cell's size
  const std::size_t skipped = alone ? large : 0;
  const std::size_t stride = cell_.rooms + large;
  double seconds = 0;
  std::uint64_t bytes = 0;
  std::vector<BenchRoom> ran;
  for (std::size_t wave = 0; wave < waves_; ++wave) {
    const std::size_t first = wave * stride + skipped;
    const auto rooms = std::span(rooms_).subspan(first, stride - skipped);
    KVF_TRY(const WaveTimes times,
            run_wave(link, context_.layout, context_.prefill, context_.decode, rooms, context_.next_room));
    context_.next_room += rooms.size();
    ran.insert(ran.end(), rooms.begin(), rooms.end());
    std::uint64_t planned = 0;
    for (std::size_t i = 0; i < rooms.size(); ++i) {
      planned += list.room_bytes()[first + i];
    }
    const std::uint64_t aux = rooms.size() * aux_bytes(context_.decode);
    if (times.bytes != planned + aux) {
      return fail(Code::kInternal,
                  "{}: {} bytes have landed of a wave for which {} are planned and {} of aux rows",
                  link.fabric(), times.bytes, planned, aux);
    }
    seconds += times.seconds;
    bytes += planned;
    if (!counts) {
      continue;
    }
    auto& latencies = alone ? samples.room_seconds_alone : samples.room_seconds;
    latencies.insert(latencies.end(),
                     times.room_seconds.begin() + static_cast<std::ptrdiff_t>(large - skipped),
                     times.room_seconds.end());
    if (!alone) {
      samples.call_seconds.insert(samples.call_seconds.end(), times.call_seconds.begin(),
                                  times.call_seconds.end());
      samples.cpu[0] += times.cpu[0];
      samples.cpu[1] += times.cpu[1];
    }
  }
  KVF_TRY(const double writes_after, scrape_counter(link.cluster().metrics(Side::kPrefill), kWrites));
  KVF_TRY(const std::uint64_t verified, verify(link.fabric(), ran));
  samples.verified += verified;
  if (counts && !alone) {
    samples.rates.push_back(static_cast<double>(bytes) / seconds);
    samples.bytes += bytes;
    samples.rooms += ran.size();
    samples.writes += writes_after - writes_before;
  }
  return {};
}

template <class Copy>
Result<double> CellRun::copy_once(const CopyList& list, const char* name, const Copy& copy) {
  context_.decode.poison(rooms_);
  const auto begin = steady_clock::now();
  copy();
  const std::chrono::duration<double> taken = steady_clock::now() - begin;
  KVF_TRY_VOID(verify(name, rooms_));
  return static_cast<double>(list.bytes()) / taken.count();
}

Result<void> CellRun::memcpy_turn(const CopyList& list, bool counts) {
  KVF_TRY(last_memcpy_, copy_once(list, "memcpy", [&] { list.copy_with_memcpy(); }));
  if (counts) {
    copies_.memcpy.push_back(last_memcpy_);
  }
  return {};
}

Result<void> CellRun::kernel_turn(const CopyList& list, bool counts) {
  KVF_TRY(const double one, copy_once(list, "copy kernel", [&] { list.copy_with_kernel(1); }));
  double all = one;
  if (context_.copy_threads > 1) {
    KVF_TRY(all, copy_once(list, "copy kernel", [&] { list.copy_with_kernel(context_.copy_threads); }));
  }
  if (counts) {
    copies_.kernel.push_back(one);
    copies_.kernels.push_back(all);
    copies_.kernel_to_memcpy.push_back(one / last_memcpy_);
    copies_.kernels_to_memcpy.push_back(all / last_memcpy_);
  }
  return {};
}

Result<std::uint64_t> CellRun::verify(const std::string& who, std::span<const BenchRoom> rooms) const {
  const BenchCheck check = context_.decode.check(rooms);
  if (check.differing > 0) {
    return fail(Code::kCorrupt, "{}: {} of {} bytes are wrong after {} rooms of {} tokens, the first in {}",
                who, check.differing, check.compared, rooms.size(), cell_.tokens, check.first);
  }
  return check.compared;
}

FabricResult CellRun::conclude(const std::string& fabric, const Samples& samples) const {
  FabricResult out;
  out.fabric = fabric;
  out.rate = spread(samples.rates);
  out.to_memcpy = spread(samples.to_memcpy);
  out.to_kernel = quotients(samples.to_memcpy, copies_.kernel_to_memcpy);
  out.to_kernels = quotients(samples.to_memcpy, copies_.kernels_to_memcpy);
  const double gigabytes = static_cast<double>(samples.bytes) / 1e9;
  out.cpu_per_gb = {samples.cpu[0] / gigabytes, samples.cpu[1] / gigabytes};
  out.writes_per_room = samples.writes / static_cast<double>(samples.rooms);
  out.p50 = percentile(samples.room_seconds, 0.5);
  out.p99 = percentile(samples.room_seconds, 0.99);
  out.p999 = percentile(samples.room_seconds, 0.999);
  out.rooms = samples.room_seconds.size();
  out.call_p50 = percentile(samples.call_seconds, 0.5);
  if (!samples.room_seconds_alone.empty()) {
    out.p99_alone = percentile(samples.room_seconds_alone, 0.99);
  }
  out.verified = samples.verified;
  return out;
}

}  // namespace kvferry
