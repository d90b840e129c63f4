#include "tools/cli/bench/process_usage.h"

#include <cstring>
#include <ctime>
#include <fstream>
#include <string>

namespace kvferry {

Result<double> cpu_seconds(pid_t process) {
  clockid_t clock{};
  timespec used{};
  const int code = ::clock_getcpuclockid(process, &clock);
  if (code != 0 || ::clock_gettime(clock, &used) != 0) {
    return fail(Code::kIo, "CPU time of process {}: {}", process, std::strerror(code != 0 ? code : errno));
  }
  return static_cast<double>(used.tv_sec) + 1e-9 * static_cast<double>(used.tv_nsec);
}

Result<ResidentMemory> resident_memory(pid_t process) {
  const std::string path = fmt::format("/proc/{}/status", process);
  std::ifstream file(path);
  ResidentMemory memory;
  std::string key;
  std::uint64_t kib = 0;
  std::string rest;
  int found = 0;
  while (file >> key) {
    const bool own = key == "RssAnon:" || key == "RssFile:";
    if ((own || key == "RssShmem:") && file >> kib) {
      (own ? memory.own : memory.shared) += kib * 1024;
      ++found;
    }
    std::getline(file, rest);
  }
  if (found != 3) {
    return fail(Code::kIo, "{} does not say how much of the memory is resident", path);
  }
  return memory;
}

}  // namespace kvferry
