#include "tools/cli/bench/process_usage.h"

#include <sys/resource.h>
#include <sys/time.h>
#include <unistd.h>

#include <cerrno>
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

Result<MachineCpu> machine_cpu() {
  std::ifstream file("/proc/stat");
  std::string name;
  file >> name;
  double ticks = 0;
  // user nice system idle iowait irq softirq steal; guests' time is in the first two.
  for (int column = 0; column < 8; ++column) {
    double value = 0;
    file >> value;
    ticks += column == 3 || column == 4 ? 0 : value;
  }
  if (!file || name != "cpu") {
    return fail(Code::kIo, "/proc/stat has no line of the whole machine");
  }
  MachineCpu cpu{ticks / static_cast<double>(::sysconf(_SC_CLK_TCK)), 0};
  for (const auto who : {RUSAGE_SELF, RUSAGE_CHILDREN}) {
    rusage usage{};
    if (::getrusage(who, &usage) != 0) {
      return fail(errno_error("getrusage", errno));
    }
    for (const timeval& time : {usage.ru_utime, usage.ru_stime}) {
      cpu.ours += static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
    }
  }
  return cpu;
}

}  // namespace kvferry
