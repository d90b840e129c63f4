#include "tools/cli/bench/cell_fit.h"

#include <algorithm>

namespace kvferry {

Result<CellFit> fit_cell(const DemoLayout& layout, const BenchCell& cell, std::uint64_t budget,
                         std::uint64_t batch_bytes) {
  const std::uint64_t unit = layout.unit_tokens();
  const auto whole_units = [&](std::uint64_t tokens) { return (tokens + unit - 1) / unit * unit; };
  const std::uint64_t wave_tokens = cell.rooms * whole_units(cell.tokens) + whole_units(cell.beside);
  KVF_TRY(const PoolSizes wave, pool_sizes(layout, wave_tokens, UINT64_MAX / 2));
  CellFit fit;
  fit.needed_bytes = wave.bytes;
  if (wave.bytes > budget) {
    return fit;
  }
  const std::uint64_t moved =
      std::max<std::uint64_t>(1, (cell.rooms * cell.tokens + cell.beside) * layout.model.bytes_per_token());
  const std::uint64_t wanted = (batch_bytes + moved - 1) / moved;
  const std::uint64_t rooms_allow = std::max(1u, kRoomsPerRoundMax / cell.rooms);
  fit.waves = static_cast<std::uint32_t>(
      std::clamp<std::uint64_t>(wanted, 1, std::min(rooms_allow, budget / wave.bytes)));
  fit.tokens = fit.waves * wave_tokens;
  return fit;
}

}  // namespace kvferry
