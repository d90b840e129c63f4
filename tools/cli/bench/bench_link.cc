#include "tools/cli/bench/bench_link.h"

#include <utility>

#include "tools/cli/demo/insist.h"
#include "tools/engine/attach_pool.h"

namespace kvferry {

Result<std::unique_ptr<BenchLink>> BenchLink::start(const DemoOptions& options, const DemoLayout& layout,
                                                    const PoolSizes& pools,
                                                    const std::filesystem::path& program_directory) {
  std::unique_ptr<BenchLink> link(new BenchLink(options.fabric));
  link->dtype_ = to_string(layout.model.dtype);
  KVF_TRY(link->cluster_, DemoCluster::create(options, layout, pools, program_directory));
  KVF_TRY_VOID(link->cluster_->start_daemons());
  return link;
}

BenchLink::~BenchLink() {
  detach();
}

Result<void> BenchLink::attach(const BenchSide& side) {
  const std::string socket = cluster_->engine_socket(side.side());
  auto& engines = engines_[static_cast<std::size_t>(side.side())];
  for (const BenchRank& rank : side.ranks()) {
    kvf_engine* engine = nullptr;
    std::string reason;
    const int code = insist([&] {
      return attach_pool({socket, rank.memory, rank.coord, side.page_size(), dtype_}, engine, reason);
    });
    if (code != 0) {
      return fail(code_from_number(static_cast<std::uint8_t>(-code)),
                  "{} rank {} cannot attach to the daemon of {}: {}", side_name(side.side()),
                  rank.rows.rank(), fabric_, reason);
    }
    engines.push_back(engine);
  }
  return {};
}

void BenchLink::detach() {
  for (auto& engines : engines_) {
    for (kvf_engine* engine : std::exchange(engines, {})) {
      kvf_detach(engine);
    }
  }
}

Result<void> BenchLink::stop() {
  detach();
  return cluster_->stop();
}

}  // namespace kvferry
