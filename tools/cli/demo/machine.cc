#include "tools/cli/demo/machine.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace kvferry {
namespace {

// The control group's limit; absent, "max" or unreadable mean that there is none.
std::uint64_t cgroup_headroom() {
  std::ifstream limit_file("/sys/fs/cgroup/memory.max");
  std::ifstream used_file("/sys/fs/cgroup/memory.current");
  std::uint64_t limit = 0;
  std::uint64_t used = 0;
  if (!(limit_file >> limit) || !(used_file >> used)) {
    return UINT64_MAX;
  }
  return limit > used ? limit - used : 0;
}

// An anonymous mapping with every page present.
class Buffer {
 public:
  explicit Buffer(std::uint64_t bytes) : bytes_(bytes) {
    void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    base_ = base == MAP_FAILED ? nullptr : static_cast<std::byte*>(base);
    if (base_ != nullptr) {
      std::memset(base_, 1, bytes);
    }
  }
  ~Buffer() {
    if (base_ != nullptr) {
      ::munmap(base_, bytes_);
    }
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  std::byte* base() const { return base_; }

 private:
  std::byte* base_ = nullptr;
  std::uint64_t bytes_;
};

std::uint64_t buffer_size(std::uint64_t page_bytes, std::uint64_t memory) {
  constexpr std::uint64_t kMin = 256ull << 20;
  constexpr std::uint64_t kMax = 1ull << 30;
  const long cache = ::sysconf(_SC_LEVEL3_CACHE_SIZE);
  const std::uint64_t wanted =
      std::clamp(cache > 0 ? 2 * static_cast<std::uint64_t>(cache) : kMin, kMin, kMax);
  return std::max(std::min(wanted, memory / 8) / page_bytes, std::uint64_t{1}) * page_bytes;
}

}  // namespace

Result<std::uint64_t> available_memory() {
  std::ifstream file("/proc/meminfo");
  std::string key;
  std::uint64_t kib = 0;
  std::string unit;
  while (file >> key >> kib) {
    std::getline(file, unit);
    if (key == "MemAvailable:") {
      return std::min(kib * 1024, cgroup_headroom());
    }
  }
  return fail(Code::kIo, "/proc/meminfo has no MemAvailable; give --memory");
}

Result<double> measure_memcpy(std::uint64_t page_bytes, std::uint64_t memory, std::uint64_t seed) {
  const std::uint64_t bytes = buffer_size(page_bytes, memory);
  const Buffer source(bytes);
  const Buffer target(bytes);
  if (source.base() == nullptr || target.base() == nullptr) {
    return fail(Code::kExhausted, "measuring memcpy needs two buffers of {} bytes: {}", bytes,
                std::strerror(errno));
  }
  std::vector<std::uint64_t> from(bytes / page_bytes);
  std::iota(from.begin(), from.end(), std::uint64_t{0});
  std::vector<std::uint64_t> to = from;
  std::mt19937_64 random(seed);
  std::shuffle(from.begin(), from.end(), random);
  std::shuffle(to.begin(), to.end(), random);
  double best = 0;
  for (int round = 0; round < 3; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    for (std::size_t i = 0; i < from.size(); ++i) {
      std::memcpy(target.base() + to[i] * page_bytes, source.base() + from[i] * page_bytes, page_bytes);
    }
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
    best = std::max(best, static_cast<double>(bytes) / taken.count());
  }
  return best;
}

}  // namespace kvferry
