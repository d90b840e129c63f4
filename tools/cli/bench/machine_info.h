#pragma once
// What has to stand beside a measurement.

#include <array>
#include <cstdint>
#include <string>

namespace kvferry {

struct MachineInfo {
  std::string cpu;
  unsigned cores = 0;            // that this process may use
  std::uint64_t l3_bytes = 0;    // as the CPU reports it; 0: unknown
  std::uint64_t memory = 0;      // bytes, all of it
  std::string kernel;            // name and release
  std::string version;           // of kvferry
  std::string copy_variant;      // of the copy kernel
  std::array<double, 3> load{};  // averages over 1, 5 and 15 minutes, before the run
};
/// What cannot be read stays empty.
MachineInfo machine_info();

}  // namespace kvferry
