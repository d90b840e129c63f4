#include "tools/cli/bench/machine_info.h"

#include <sched.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>

#include "kernels/copy.h"

namespace kvferry {
namespace {

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const std::size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) {
      return line.substr(colon + 2);
    }
  }
  return {};
}

unsigned usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return ::sched_getaffinity(0, sizeof(set), &set) == 0 ? static_cast<unsigned>(CPU_COUNT(&set)) : 0;
}

std::uint64_t positive(long value) {
  return value > 0 ? static_cast<std::uint64_t>(value) : 0;
}

}  // namespace

MachineInfo machine_info() {
  MachineInfo info;
  info.cpu = cpu_model();
  info.cores = usable_cores();
  info.l3_bytes = positive(::sysconf(_SC_LEVEL3_CACHE_SIZE));
  info.memory = positive(::sysconf(_SC_PHYS_PAGES)) * positive(::sysconf(_SC_PAGESIZE));
  utsname system{};
  if (::uname(&system) == 0) {
    info.kernel = std::string(system.sysname) + " " + system.release;
  }
  info.version = KVF_VERSION;
  info.copy_variant = to_string(copy_variants().front());
  if (::getloadavg(info.load.data(), static_cast<int>(info.load.size())) < 0) {
    info.load = {};
  }
  return info;
}

}  // namespace kvferry
