#include "common/base/cpu_set.h"

#include <charconv>
#include <fstream>

#include "common/base/check.h"

namespace kvferry {
namespace {

/// A number at the start of `text`, which is taken away; false when there is none below CPU_SETSIZE.
bool take_number(std::string_view& text, unsigned& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || value >= CPU_SETSIZE) {
    return false;
  }
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return true;
}

bool take(std::string_view& text, char wanted) {
  const bool found = !text.empty() && text.front() == wanted;
  text.remove_prefix(found ? 1 : 0);
  return found;
}

/// "0-3,8"
bool parse_list(std::string_view text, cpu_set_t& cpus) {
  do {
    unsigned first = 0;
    if (!take_number(text, first)) {
      return false;
    }
    unsigned last = first;
    if (take(text, '-') && (!take_number(text, last) || last < first)) {
      return false;
    }
    for (unsigned cpu = first; cpu <= last; ++cpu) {
      CPU_SET(cpu, &cpus);
    }
  } while (take(text, ','));
  return text.empty();
}

Result<std::string> node_list(std::string_view node) {
  const std::string path = fmt::format("/sys/devices/system/node/{}/cpulist", node);
  std::ifstream file(path);
  std::string list;
  if (!std::getline(file, list) || list.empty()) {
    return fail(Code::kInvalid, "'{}' is no NUMA node with processors on this host ({})", node, path);
  }
  return list;
}

std::string to_list(const cpu_set_t& cpus) {
  std::string out;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &cpus)) {
      continue;
    }
    const int first = cpu;
    while (cpu + 1 < CPU_SETSIZE && CPU_ISSET(cpu + 1, &cpus)) {
      ++cpu;
    }
    out += fmt::format("{}{}", out.empty() ? "" : ",", first);
    out += cpu > first ? fmt::format("-{}", cpu) : "";
  }
  return out;
}

bool is_node(std::string_view text) {
  return text.starts_with("node") && text.size() > 4 &&
         text.find_first_not_of("0123456789", 4) == std::string_view::npos;
}

}  // namespace

Result<CpuSet> CpuSet::parse(std::string_view text) {
  CpuSet out;
  out.text_ = text;
  if (text.empty()) {
    return out;
  }
  std::string list(text);
  if (is_node(text)) {
    KVF_TRY(list, node_list(text));
  }
  if (!parse_list(list, out.cpus_)) {
    return fail(Code::kInvalid, "is '{}', must be a list like \"0-3,8\" or a NUMA node like \"node0\"", text);
  }
  cpu_set_t allowed{};
  KVF_CHECK(::sched_getaffinity(0, sizeof allowed, &allowed) == 0);
  cpu_set_t usable{};
  CPU_AND(&usable, &allowed, &out.cpus_);
  if (!CPU_EQUAL(&usable, &out.cpus_)) {
    return fail(Code::kInvalid, "is '{}' (processors {}), but this process may use {} only", text,
                to_list(out.cpus_), to_list(allowed));
  }
  return out;
}

PinnedScope::PinnedScope(const CpuSet& cpus) {
  if (cpus.text().empty()) {
    return;
  }
  // A processor may have gone offline since the text was checked; then the threads run where they can.
  pinned_ = ::sched_getaffinity(0, sizeof before_, &before_) == 0 &&
            ::sched_setaffinity(0, sizeof cpus.cpus_, &cpus.cpus_) == 0;
}

PinnedScope::~PinnedScope() {
  if (pinned_) {
    (void)::sched_setaffinity(0, sizeof before_, &before_);
  }
}

}  // namespace kvferry
