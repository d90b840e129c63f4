#pragma once
// Where kvferry itself lies, and with it the daemons that it starts.

#include <filesystem>

namespace kvferry {

inline std::filesystem::path program_directory() {
  std::error_code error;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", error);
  return error ? std::filesystem::path(".") : self.parent_path();
}

}  // namespace kvferry
