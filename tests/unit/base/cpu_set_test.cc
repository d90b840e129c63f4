#include <algorithm>
#include <catch2/catch.hpp>
#include <thread>

#include "common/base/cpu_set.h"

namespace kvferry::test {
namespace {

using Catch::Matchers::Contains;

cpu_set_t own_cpus() {
  cpu_set_t cpus{};
  REQUIRE(::sched_getaffinity(0, sizeof cpus, &cpus) == 0);
  return cpus;
}

int first_of(const cpu_set_t& cpus) {
  int cpu = 0;
  while (!CPU_ISSET(cpu, &cpus)) {
    ++cpu;
  }
  return cpu;
}

TEST_CASE("cpu set: threads that start in the scope run where it says, later ones and this one do not") {
  const cpu_set_t before = own_cpus();
  const int cpu = first_of(before);
  const auto one = CpuSet::parse(std::to_string(cpu));
  REQUIRE(one);
  const auto seen_by_thread = [] {
    cpu_set_t seen{};
    std::thread([&] { CHECK(::sched_getaffinity(0, sizeof seen, &seen) == 0); }).join();
    return seen;
  };
  {
    const PinnedScope scope(*one);
    const cpu_set_t seen = seen_by_thread();
    CHECK(CPU_COUNT(&seen) == 1);
    CHECK(CPU_ISSET(cpu, &seen));
  }
  const cpu_set_t after = seen_by_thread();
  CHECK(CPU_EQUAL(&after, &before));
  {
    const PinnedScope scope(CpuSet::parse("").value());
    const cpu_set_t seen = seen_by_thread();
    CHECK(CPU_EQUAL(&seen, &before));
  }
}

TEST_CASE("cpu set: lists and nodes are read, everything else is an error that says what may be used") {
  const int cpu = first_of(own_cpus());
  CHECK(CpuSet::parse(fmt::format("{}-{}", cpu, cpu)));
  CHECK(CpuSet::parse(fmt::format("{},{}", cpu, cpu)));
  for (const char* bad :
       {"x", "-", "0-", "1-0", "0,", ",0", "0 1", "-1", "1024", "99999999999", "node", "nodex"}) {
    CAPTURE(bad);
    const auto parsed = CpuSet::parse(bad);
    REQUIRE_FALSE(parsed);
    CHECK(parsed.error().code == Code::kInvalid);
    CHECK_THAT(parsed.error().message, Contains(fmt::format("'{}'", bad)));
  }
  const auto beyond = CpuSet::parse("1023");
  REQUIRE_FALSE(beyond);
  CHECK_THAT(beyond.error().message, Contains("may use") && Contains("1023"));
  const auto no_node = CpuSet::parse("node987");
  REQUIRE_FALSE(no_node);
  CHECK_THAT(no_node.error().message, Contains("no NUMA node"));
}

}  // namespace
}  // namespace kvferry::test
