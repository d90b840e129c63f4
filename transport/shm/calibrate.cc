#include "transport/shm/calibrate.h"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <thread>
#include <vector>

#include "common/base/clock.h"
#include "kernels/copy.h"

namespace kvferry::shm {
namespace {

constexpr std::uint64_t kMeasuredBytes = 64ull << 20;
constexpr std::uint32_t kThreadsMax = 8;
constexpr double kWorthIt = 1.25;

class Area {
 public:
  explicit Area(std::uint64_t bytes) : bytes_(bytes) {
    void* memory =
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    data_ = memory == MAP_FAILED ? nullptr : static_cast<std::byte*>(memory);
  }
  ~Area() {
    if (data_ != nullptr) {
      ::munmap(data_, bytes_);
    }
  }
  Area(const Area&) = delete;
  Area& operator=(const Area&) = delete;
  std::byte* data() const { return data_; }

 private:
  std::uint64_t bytes_;
  std::byte* data_ = nullptr;
};

std::uint32_t processors() {
  cpu_set_t cpus{};
  return ::sched_getaffinity(0, sizeof cpus, &cpus) == 0 ? static_cast<std::uint32_t>(CPU_COUNT(&cpus)) : 1;
}

}  // namespace

double measure_copy_rate(std::uint32_t threads, std::uint64_t bytes) {
  const Area from(bytes);
  const Area to(bytes);
  if (from.data() == nullptr || to.data() == nullptr) {
    return 0;
  }
  const std::uint64_t share = bytes / threads / 4096 * 4096;
  std::vector<std::thread> crew;
  const std::int64_t begin = steady_now();
  for (std::uint32_t i = 0; i < threads; ++i) {
    crew.emplace_back([&, i] {
      copy_run(to.data() + i * share, from.data() + i * share, share, 1, share, share);
      copy_fence();
    });
  }
  for (std::thread& thread : crew) {
    thread.join();
  }
  const auto nanos = static_cast<double>(std::max<std::int64_t>(1, steady_now() - begin));
  return static_cast<double>(share * threads) * 1e9 / nanos;
}

std::uint32_t choose_copy_threads(std::uint32_t threads_max,
                                  const std::function<double(std::uint32_t)>& rate) {
  std::uint32_t threads = 1;
  if (threads_max <= 1) {
    return threads;
  }
  double best = rate(threads);
  while (2 * threads <= threads_max) {
    const double next = rate(2 * threads);
    if (next <= kWorthIt * best) {
      break;
    }
    best = next;
    threads *= 2;
  }
  return threads;
}

std::uint32_t calibrate_copy_threads() {
  return choose_copy_threads(std::min(kThreadsMax, processors() / 2), [](std::uint32_t threads) {
    // A neighbour's burst must not decide: the better of two.
    return std::max(measure_copy_rate(threads, kMeasuredBytes), measure_copy_rate(threads, kMeasuredBytes));
  });
}

}  // namespace kvferry::shm
