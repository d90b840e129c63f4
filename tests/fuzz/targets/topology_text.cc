// A layout as people write it ("tp=4,dcp=4"): its text form reads back as the same layout.

#include "common/topology/topology.h"
#include "tests/fuzz/fuzz.h"

namespace kvferry::fuzz {

std::vector<std::string> seeds() {
  return {"tp=4,dcp=4",
          "tp=1,pp=2,pp_layers=31+30",
          "tp=8,pp=2,cp=2,cp_split=zigzag,dp=4,dcp=2,interleave=64",
          "cp=3,cp_split=pages",
          "tp=4096,dp=16",
          "tp=0",
          "tp=1,tp=1",
          "tp=-1",
          "=,=",
          ""};
}

}  // namespace kvferry::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvferry;
  const auto topology = parse_topology(fuzz::text_of(data, size));
  if (!topology) {
    fuzz::check_reason(topology.error());
    return 0;
  }
  const auto second = parse_topology(to_string(*topology));
  KVF_CHECK(second && *second == *topology);
  const RankIndex last = topology->rank_count() - 1;
  KVF_CHECK(topology->rank_index(topology->coord(last)) == last);
  return 0;
}
