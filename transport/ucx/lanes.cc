#include "transport/ucx/lanes.h"

#include <algorithm>

namespace kvferry::ucx {
namespace {

std::string_view trim(std::string_view text) {
  const auto begin = text.find_first_not_of(" \t");
  if (begin == std::string_view::npos) {
    return {};
  }
  return text.substr(begin, text.find_last_not_of(" \t\r") - begin + 1);
}

// "0:tcp/lo.0 md[0]  -> md[0]/tcp/sysdev[255] am am_bw#0": resource number, transport/device.path, domains,
// uses.
Lane parse_lane(std::string_view text) {
  Lane lane;
  const auto colon = text.find(':');
  if (colon == std::string_view::npos) {
    return lane;
  }
  text.remove_prefix(colon + 1);
  const auto blank = text.find(' ');
  std::string_view name = text.substr(0, blank);
  if (const auto dot = name.rfind('.'); dot != std::string_view::npos) {
    name = name.substr(0, dot);
  }
  lane.transport = name;
  if (const auto arrow = text.find("-> "); arrow != std::string_view::npos) {
    const auto after = text.substr(arrow + 3);
    if (const auto uses = after.find(' '); uses != std::string_view::npos) {
      lane.uses = trim(after.substr(uses));
    }
  }
  return lane;
}

}  // namespace

std::vector<Lane> parse_lanes(std::string_view info) {
  std::vector<Lane> lanes;
  while (!info.empty()) {
    const auto end = info.find('\n');
    const std::string_view line = info.substr(0, end);
    info.remove_prefix(end == std::string_view::npos ? info.size() : end + 1);
    const auto begin = line.find("lane[");
    const auto close = line.find("]:", begin == std::string_view::npos ? line.size() : begin);
    if (begin == std::string_view::npos || close == std::string_view::npos) {
      continue;
    }
    Lane lane = parse_lane(trim(line.substr(close + 2)));
    if (!lane.transport.empty()) {
      lanes.push_back(std::move(lane));
    }
  }
  return lanes;
}

std::string lane_names(const std::vector<Lane>& lanes) {
  std::vector<std::string> names;
  for (const Lane& lane : lanes) {
    if (std::find(names.begin(), names.end(), lane.transport) == names.end()) {
      names.push_back(lane.transport);
    }
  }
  std::string out;
  for (const auto& name : names) {
    out += (out.empty() ? "" : ", ") + name;
  }
  return out.empty() ? "none" : out;
}

bool puts_are_native(const std::vector<Lane>& lanes) {
  bool any = false;
  for (const Lane& lane : lanes) {
    // Lane uses are words; "rma_bw" is rendezvous and says nothing about puts.
    const std::string padded = " " + lane.uses;
    const bool rma = padded.find(" rma#") != std::string::npos || padded.find(" rma ") != std::string::npos ||
                     padded.ends_with(" rma");
    if (!rma) {
      continue;
    }
    if (!lane.transport.starts_with("rc") && !lane.transport.starts_with("dc")) {
      return false;
    }
    any = true;
  }
  return any;
}

}  // namespace kvferry::ucx
