#include "common/daemon/runtime.h"

#include <systemd/sd-daemon.h>

#include <map>

#include "common/base/boot_id.h"

namespace kvferry {

Descriptor describe(Role role, const DaemonConfig& config, Epoch epoch) {
  Descriptor out;
  out.role = role;
  out.protocol_min = 1;
  out.protocol_max = 1;
  out.build = KVF_VERSION;
  out.epoch = epoch;
  out.instance = config.instance;
  out.host_id = boot_id();
  out.model.name = config.model.name;
  out.geometry = config.model;
  out.page_size = config.page_size;
  out.topology = config.topology;
  out.limits = {{"pages_per_room", config.limits.pages_per_room}, {"rooms", config.limits.rooms}};
  return out;
}

RankDescription describe_rank(const DaemonConfig& config, const PoolLayout& layout) {
  RankDescription out;
  out.index = layout.rank;
  out.coord = config.topology.coord(layout.rank);
  for (const BufferPlace& buffer : layout.buffers) {
    out.buffers.push_back(
        {buffer.shape.layer, buffer.shape.kind,
         std::uint64_t{buffer.shape.row_bytes} * buffer.shape.rows_of_page(layout.page_size),
         buffer.shape.pages});
  }
  for (const AuxField& field : layout.aux) {
    out.aux.push_back({field.name, field.width, field.slots});
  }
  return out;
}

namespace {

// Every (layer, kind) that the rank owns must be there exactly once, with the configured row size.
void check_buffers(const DaemonConfig& config, const EngineAttach& attach, const RankCoord& coord,
                   std::vector<std::string>& problems) {
  std::map<BufferId, BufferShape> wanted;
  const std::uint32_t draft_rows = rows_of_page(RowSpace::kDraft, config.page_size, config.topology);
  for (const BufferShape& shape : rank_buffers(config.model, config.topology, coord, 1, draft_rows)) {
    wanted[shape.id()] = shape;
  }
  const std::size_t wanted_count = wanted.size();
  for (std::size_t i = 0; i < attach.layout.buffers.size(); ++i) {
    const BufferShape& shape = attach.layout.buffers[i].shape;
    const auto at = wanted.find(shape.id());
    if (at == wanted.end()) {
      problems.push_back(
          fmt::format("buffers[{}] is layer {} {}, which this rank does not own or which came before", i,
                      shape.layer, to_string(shape.kind)));
      continue;
    }
    if (at->second.row_bytes != shape.row_bytes) {
      problems.push_back(fmt::format("buffers[{}] (layer {} {}): row_bytes is {}, the configuration says {}",
                                     i, shape.layer, to_string(shape.kind), shape.row_bytes,
                                     at->second.row_bytes));
    }
    const std::uint32_t rows = at->second.rows_of_page(config.page_size);
    if (shape.rows_of_page(attach.layout.page_size) != rows) {
      problems.push_back(fmt::format("buffers[{}] (layer {} {}): page_rows is {}, its pages have {}", i,
                                     shape.layer, to_string(shape.kind),
                                     shape.rows_of_page(attach.layout.page_size), rows));
    }
    wanted.erase(at);
  }
  if (!wanted.empty()) {
    problems.push_back(fmt::format("{} of {} buffers are missing, first layer {} {}", wanted.size(),
                                   wanted_count, wanted.begin()->first.layer,
                                   to_string(wanted.begin()->first.kind)));
  }
}

}  // namespace

Result<RankIndex> check_attach(const DaemonConfig& config, const EngineAttach& attach) {
  const RankCoord& c = attach.coord;
  const Topology& t = config.topology;
  if (c.tp >= t.tp || c.pp >= t.pp || c.cp >= t.cp || c.dp >= t.dp) {
    return fail(Code::kMismatch, "rank tp={} pp={} cp={} dp={} is outside the configured topology {}", c.tp,
                c.pp, c.cp, c.dp, to_string(t));
  }
  const RankIndex rank = t.rank_index(c);
  std::vector<std::string> problems;
  bool served = false;
  for (const RankIndex mine : config.ranks) {
    served = served || mine == rank;
  }
  if (!served) {
    problems.push_back(fmt::format("rank {} is not in this daemon's \"ranks\"", rank));
  }
  if (attach.layout.page_size != config.page_size) {
    problems.push_back(
        fmt::format("page_size is {}, the configuration says {}", attach.layout.page_size, config.page_size));
  }
  if (attach.dtype != config.model.dtype) {
    problems.push_back(fmt::format("dtype is {}, the configuration says {}", to_string(attach.dtype),
                                   to_string(config.model.dtype)));
  }
  check_buffers(config, attach, c, problems);
  if (problems.empty()) {
    return rank;
  }
  std::string all = fmt::format("the pool of rank {} does not fit this daemon's configuration: ", rank);
  for (std::size_t i = 0; i < problems.size() && i < 8; ++i) {
    all += (i == 0 ? "" : "; ") + problems[i];
  }
  if (problems.size() > 8) {
    all += fmt::format("; and {} more", problems.size() - 8);
  }
  return fail(Error{Code::kMismatch, all});
}

void notify_systemd(const char* state) {
  ::sd_notify(0, state);
}

}  // namespace kvferry
