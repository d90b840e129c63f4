#include "transport/ucx/ucx_options.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <optional>
#include <vector>

namespace kvferry {
namespace {

constexpr std::uint32_t kStagingMin = 64u << 10;
constexpr std::uint32_t kStagingMax = 2u << 20;
constexpr std::uint32_t kWindowMax = 1024;
constexpr std::uint32_t kSpinMaxUs = 10'000;

std::optional<std::uint16_t> parse_port(std::string_view text) {
  std::uint16_t port = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), port);
  if (error != std::errc{} || end != text.data() + text.size() || port == 0) {
    return std::nullopt;
  }
  return port;
}

bool port_range_is_legal(std::string_view text) {
  const auto dash = text.find('-');
  if (dash == std::string_view::npos) {
    return false;
  }
  const auto first = parse_port(text.substr(0, dash));
  const auto last = parse_port(text.substr(dash + 1));
  return first && last && *first <= *last;
}

// The text ends up in UCX's own parser, so only characters of device names pass.
bool device_is_legal(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == ':' || c == ',' || c == '.' || c == '-';
  });
}

}  // namespace

std::string_view to_string(UcxTransports transports) {
  switch (transports) {
    case UcxTransports::kShm:
      return "shm";
    case UcxTransports::kTcp:
      return "tcp";
    case UcxTransports::kRdma:
      return "rdma";
  }
  return "?";
}

Result<UcxTransports> parse_ucx_transports(std::string_view text) {
  for (const auto candidate : {UcxTransports::kShm, UcxTransports::kTcp, UcxTransports::kRdma}) {
    if (text == to_string(candidate)) {
      return candidate;
    }
  }
  return fail(Code::kInvalid, "ucx transports '{}' is unknown; use shm, tcp or rdma", text);
}

Result<void> validate(const UcxOptions& options) {
  std::vector<std::string> wrong;
  if (options.staging_bytes < kStagingMin || options.staging_bytes > kStagingMax) {
    wrong.push_back(
        fmt::format("staging_bytes {} is outside {}..{}", options.staging_bytes, kStagingMin, kStagingMax));
  }
  if (options.window > kWindowMax) {
    wrong.push_back(fmt::format("window {} is above {}", options.window, kWindowMax));
  }
  if (options.spin_us > kSpinMaxUs) {
    wrong.push_back(fmt::format("spin_us {} is above {}", options.spin_us, kSpinMaxUs));
  }
  if (!options.port_range.empty() && !port_range_is_legal(options.port_range)) {
    wrong.push_back(fmt::format("port_range '{}' is not of the form first-last", options.port_range));
  }
  if (!device_is_legal(options.device)) {
    wrong.push_back(fmt::format("device '{}' has characters that no device name has", options.device));
  }
  if (options.transports == UcxTransports::kTcp && options.device == "all") {
    wrong.push_back("device 'all' would let UCX listen on every interface; name the interface");
  }
  if (options.allow_emulated_puts && options.transports != UcxTransports::kShm) {
    wrong.push_back(
        fmt::format("allow_emulated_puts is for tests over shm, not {}", to_string(options.transports)));
  }
  if (!wrong.empty()) {
    return fail(Code::kInvalid, "ucx: {}", fmt::join(wrong, "; "));
  }
  return {};
}

Result<std::string> rdma_devices() {
  constexpr const char* kFolder = "/sys/class/infiniband";
  std::error_code error;
  std::vector<std::string> names;
  for (auto it = std::filesystem::directory_iterator(kFolder, error);
       !error && it != std::filesystem::directory_iterator(); it.increment(error)) {
    names.push_back(it->path().filename().string());
  }
  if (names.empty()) {
    return fail(
        Code::kUnavailable,
        "this host has no RDMA device ({} is empty or missing), so ucx transports rdma cannot start; install "
        "the NIC and its driver, or use the fabric tcp",
        kFolder);
  }
  std::sort(names.begin(), names.end());
  return fmt::format("{}", fmt::join(names, ","));
}

}  // namespace kvferry
