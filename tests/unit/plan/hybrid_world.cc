#include "tests/unit/plan/hybrid_world.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "common/topology/rank_map.h"
#include "tests/unit/plan/hybrid_oracle.h"
#include "tests/unit/plan/oracle.h"

namespace kvferry::test {
namespace {

/// What a random model has; each with every other.
struct Features {
  bool sliding = false;
  bool state = false;
  bool index = false;
};

void random_layers(Rng& rng, const Features& features, ModelGeometry& model) {
  model.hidden_layers = rng.between32(1, 6);
  for (std::uint32_t layer = 0; layer < model.hidden_layers; ++layer) {
    const std::uint64_t role = rng.below(8);
    if (role < 3 && features.state) {
      model.state_layers.push_back(layer);
    } else if (role < 5 && features.sliding) {
      model.sliding_layers.push_back(layer);
    } else if (role < 7) {
      model.kv_layers.push_back(layer);
    }
  }
  if (model.kv_layers.empty() && model.sliding_layers.empty()) {
    model.kv_layers.push_back(model.hidden_layers++);
  }
}

/// One or two tensors; their blocks mostly divide by both TP sizes.
void random_state(Rng& rng, std::uint32_t prefill_tp, std::uint32_t decode_tp, ModelGeometry& model) {
  std::vector<BufferKind> kinds{BufferKind::kConv, BufferKind::kRecurrent};
  rng.shuffle(kinds);
  kinds.resize(rng.between(1, 2));
  const bool divides = prefill_tp > 0 && decode_tp > 0 && rng.chance(5, 6);
  const std::uint32_t unit = divides ? std::lcm(prefill_tp, decode_tp) : 1;
  for (const BufferKind kind : kinds) {
    StateTensor& tensor = model.state.emplace_back();
    tensor.kind = kind;
    tensor.outer = rng.between32(1, 3);
    tensor.element_bytes = rng.between32(1, 3);
    for (std::uint64_t left = rng.between(1, 3); left > 0; --left) {
      tensor.blocks.push_back(unit * rng.between32(1, divides ? 2 : 12));
    }
  }
}

ModelGeometry random_hybrid_model(Rng& rng, const Features& features) {
  ModelGeometry model;
  model.name = "hybrid";
  model.dtype = rng.pick(std::vector{Dtype::kInt8, Dtype::kInt8, Dtype::kBf16, Dtype::kFp8E4m3});
  random_layers(rng, features, model);
  if (rng.chance(1, 2)) {
    model.attention = AttentionKind::kMla;
    model.kv_heads = 1;
    model.latent_dim = rng.between32(1, 2);
    model.rope_dim = rng.between32(0, 1);
  } else {
    model.kv_heads = rng.chance(3, 4) ? 1u << rng.between32(0, 3) : rng.between32(1, 8);
    model.head_dim = rng.between32(1, 2);
    model.v_head_dim = rng.between32(1, 2);
  }
  if (features.index) {
    model.index_head_dim = rng.chance(1, 8) ? 129 : rng.between32(1, 3);
  }
  if (!model.sliding_layers.empty()) {
    model.sliding_window = rng.between32(1, 40);
  }
  model.draft_layers = rng.chance(1, 2) ? rng.between32(1, 2) : 0;
  return model;
}

using PoolPages = std::array<std::uint64_t, kRowSpaces>;

/// A pool with at least `pages` pages in each space.
RankShape random_shape(Rng& rng, const HybridWorld& world, bool prefill, const RankCoord& coord,
                       const PoolPages& pages) {
  const ModelGeometry& model = world.base.model;
  const Topology& topology = prefill ? world.base.prefill : world.base.decode;
  const bool draft = prefill ? world.prefill_draft : world.decode_draft;
  RankShape shape{topology, coord, prefill ? world.base.prefill_page : world.base.decode_page, {}};
  std::array<std::uint32_t, kBufferKinds> gaps{};
  for (std::uint32_t& gap : gaps) {
    gap = rng.chance(1, 3) ? rng.between32(1, 3) : 0;
  }
  for (const BufferId& id : oracle::buffers_of(model, topology, coord, draft)) {
    const RowSpace space = oracle::space_of(model, id);
    BufferShape buffer{id.layer, id.kind};
    buffer.row_bytes = static_cast<std::uint32_t>(oracle::row_tags(model, topology, coord.tp, id).size());
    buffer.pages = pages[static_cast<std::size_t>(space)] + rng.below(3);
    const std::uint32_t rows = oracle::rows_in_page(space, shape.page_size, topology);
    // The same said in another way: 0 stands for what the pool says.
    buffer.page_rows = rows == shape.page_size && rng.chance(1, 2) ? 0 : rows;
    const std::uint32_t gap =
        rng.chance(1, 8) ? rng.between32(0, 3) : gaps[static_cast<std::size_t>(id.kind)];
    buffer.pitch = gap == 0 && rng.chance(1, 2) ? 0 : rows + gap;
    shape.buffers.push_back(buffer);
  }
  if (!prefill && rng.chance(1, 8)) {
    // Of another draft model, which is none of this pair's business.
    shape.buffers.push_back({model.hidden_layers + model.draft_layers + rng.between32(0, 2),
                             BufferKind::kLatent, 3, rng.between(1, 3)});
  }
  if (rng.chance(1, 2)) {
    rng.shuffle(shape.buffers);
  }
  return shape;
}

/// One side's names of the rows of a request, with the storage of their lists.
struct Names {
  std::vector<std::uint32_t> pages;
  std::uint64_t first = 0;
  std::vector<std::uint32_t> window_pages;
  std::uint64_t window_first = 0;
  std::uint32_t state_slot = 0;
  PoolPages pool{};

  RequestRows rows() const { return {pages, first, window_pages, window_first, state_slot}; }
};

Names random_names(Rng& rng, std::uint64_t first, std::uint64_t virtual_page, std::uint64_t window_begin,
                   std::uint64_t end) {
  Names names;
  const auto draw = [&](std::uint64_t from, RowSpace space) {
    const std::uint64_t count = (end - from + virtual_page - 1) / virtual_page + rng.below(2);
    std::uint64_t& pool = names.pool[static_cast<std::size_t>(space)];
    pool = count + rng.between(1, 3);
    return random_pages(rng, count, pool);
  };
  names.first = first;
  names.pages = draw(first, RowSpace::kTokens);
  names.pool[static_cast<std::size_t>(RowSpace::kDraft)] =
      names.pool[static_cast<std::size_t>(RowSpace::kTokens)];
  const std::uint64_t latest = window_begin / virtual_page;
  names.window_first = virtual_page * (rng.chance(1, 2) ? latest : rng.below(latest + 1));
  names.window_pages = draw(names.window_first, RowSpace::kWindow);
  std::uint64_t& slots = names.pool[static_cast<std::size_t>(RowSpace::kState)];
  slots = rng.between(1, 4);
  names.state_slot = static_cast<std::uint32_t>(rng.below(slots));
  return names;
}

bool find_in(const std::vector<RankIndex>& ranks, RankIndex rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

/// Every run names each of its rows twice: by place in the pool, and by place in the granted list.
bool runs_are_right(const PairLayout& layout, const PartRequest& part, const Plan& plan, std::string& why) {
  std::vector<std::uint32_t> pages;
  switch (layout.space) {
    case RowSpace::kTokens:
    case RowSpace::kDraft:
      pages.assign(part.dst.pages.begin(), part.dst.pages.end());
      break;
    case RowSpace::kWindow:
      pages.assign(part.dst.window_pages.begin(), part.dst.window_pages.end());
      break;
    case RowSpace::kState:
      pages.push_back(part.dst.state_slot.value());
      break;
  }
  const TokenClass& src = layout.src_tokens;
  const TokenClass& dst = layout.dst_tokens;
  const bool ascends = src.count == 1 || dst.count == 1 || src.interleave == dst.interleave;
  std::uint64_t last = 0;
  for (const RowRun& run : plan.runs) {
    if (run.rows == 0 || run.count == 0 || run.src_step < run.rows || run.dst_step < run.rows ||
        (ascends && &run != &plan.runs.front() && run.dst_index <= last)) {
      why = "a run is empty, overlaps itself or does not ascend";
      return false;
    }
    last = run.dst_index;
    for (std::uint64_t piece = 0; piece < run.count; ++piece) {
      for (std::uint64_t row = 0; row < run.rows; ++row) {
        const std::uint64_t index = run.dst_index + piece * run.dst_step + row;
        const std::uint64_t page = index / layout.dst_page_size;
        if (page >= pages.size() ||
            pages[page] * std::uint64_t{layout.dst_pitch} + index % layout.dst_page_size !=
                run.dst_row + piece * run.dst_step + row) {
          why = fmt::format("dst_index {} and dst_row {} are different rows", run.dst_index, run.dst_row);
          return false;
        }
      }
    }
  }
  return true;
}

/// All sources of one destination for one request, against the destination memory the oracle expects.
class HybridTransfer {
 public:
  HybridTransfer(Rng& rng, const HybridWorld& world, const Request& request, const Route& route,
                 HybridTally& tally)
      : rng_(rng), world_(world), request_(request), route_(route), tally_(tally) {
    PartRequest last;
    last.request = {request.prefix, request.tokens};
    last.window = world.base.model.sliding_window;
    last.last = true;
    window_ = oracle::moving_tokens(RowSpace::kWindow, last);
    into_ =
        random_names(rng, request.dst_first, world.base.decode_virtual_page(), window_.begin, request.tokens);
    dst_ = random_shape(rng, world, false, world.base.decode.coord(route.decode_rank), into_.pool);
  }

  bool run(std::string& why) {
    const World& base = world_.base;
    targets_ = decode_targets(base.model, base.prefill, base.decode, route_.decode_rank, route_.prefill_dp,
                              request_.room);
    oracle::Ledger ledger(dst_);
    const RankIndex ranks = base.prefill.rank_count() / base.prefill.dp;
    for (RankIndex index = route_.prefill_dp * ranks; index < (route_.prefill_dp + 1) * ranks; ++index) {
      if (!send(index, ledger, why)) {
        why = fmt::format("prefill rank {}: {}", index, why);
        return false;
      }
    }
    const oracle::Content wanted{
        {request_.prefix, request_.tokens}, window_, world_.prefill_draft && world_.decode_draft};
    return ledger.matches(oracle::Memory(base.model, dst_, into_.rows(), wanted), why);
  }

 private:
  bool send(RankIndex index, oracle::Ledger& ledger, std::string& why) {
    const World& base = world_.base;
    const bool is_target = find_in(targets_.targets, index);
    if (!is_target && !rng_.chance(1, 8)) {
      return true;
    }
    const Names from = random_names(rng_, 0, base.prefill_virtual_page(), window_.begin, request_.tokens);
    const RankShape shape = random_shape(rng_, world_, true, base.prefill.coord(index), from.pool);
    const auto layouts = pair_layouts(base.model, shape, dst_);
    if (!layouts) {
      why = "refused: " + layouts.error().message;
      return false;
    }
    if (rng_.chance(1, 12) && !spoiled_shape_is_refused(shape, *layouts, why)) {
      return false;
    }
    std::vector<PairLayout> sending;
    bool shares = false;
    for (const PairLayout& layout : *layouts) {
      shares = shares || !layout.pairs.empty();
      if (!layout.pairs.empty() && layout.elected(request_.room)) {
        sending.push_back(layout);
      }
    }
    tally_.bare_stages += is_target && layouts->front().pairs.empty();
    if ((shares && !is_target) || layouts->front().space != RowSpace::kTokens) {
      why = "shares rows without being a target, or its first part is not of the tokens";
      return false;
    }
    return sending.empty() ||
           (is_known_sender(index, why) && plan_and_apply(shape, from, sending, ledger, why));
  }

  bool is_known_sender(RankIndex index, std::string& why) const {
    const World& base = world_.base;
    const auto destinations = prefill_destinations(base.model, base.prefill, base.decode, index,
                                                   base.decode.coord(route_.decode_rank).dp);
    why = "sends, but decode_targets or prefill_destinations does not say so";
    return find_in(targets_.sources, index) && find_in(destinations, route_.decode_rank);
  }

  bool plan_and_apply(const RankShape& shape, const Names& from, const std::vector<PairLayout>& sending,
                      oracle::Ledger& ledger, std::string& why) {
    const oracle::Memory memory(
        world_.base.model, shape, from.rows(),
        {{0, request_.tokens}, {from.window_first, request_.tokens}, world_.prefill_draft});
    std::uint64_t begin = request_.prefix;
    for (std::size_t chunk = 0; chunk < request_.cuts.size(); ++chunk) {
      const std::uint64_t end = request_.cuts[chunk];
      PartRequest part;
      part.tokens = {begin, end};
      part.request = {request_.prefix, request_.tokens};
      part.window = world_.base.model.sliding_window;
      part.last = chunk + 1 == request_.cuts.size();
      part.src = from.rows();
      part.dst = into_.rows();
      if (rng_.chance(2, 3)) {
        cut_pages(part);
      }
      for (const PairLayout& layout : sending) {
        if (!plan_part_and_apply(shape, layout, part, memory, ledger, why)) {
          why = fmt::format("{} part, tokens {} to {}: {}", to_string(layout.space), begin, end, why);
          return false;
        }
      }
      begin = end;
    }
    return true;
  }

  /// Leaves the source only the pages of the chunk.
  void cut_pages(PartRequest& part) const {
    const std::uint64_t page_tokens = world_.base.prefill_virtual_page();
    const std::size_t skip = std::min<std::size_t>(part.tokens.begin / page_tokens, part.src.pages.size());
    const std::size_t stop = (part.tokens.end + page_tokens - 1) / page_tokens;
    part.src.pages = part.src.pages.subspan(skip, std::max(skip, stop) - skip);
    part.src.first_token = skip * page_tokens;
  }

  bool plan_part_and_apply(const RankShape& shape, const PairLayout& layout, const PartRequest& part,
                           const oracle::Memory& memory, oracle::Ledger& ledger, std::string& why) {
    const auto plan = plan_part(layout, part);
    if (!plan) {
      why = "refused: " + plan.error().message;
      return false;
    }
    if (!runs_are_right(layout, part, *plan, why) || !ledger.apply(*plan, shape, memory, why)) {
      return false;
    }
    count(layout, *plan);
    return !rng_.chance(1, 6) || spoiled_part_agrees(shape, layout, part, why);
  }

  void count(const PairLayout& layout, const Plan& plan) {
    ++tally_.plans;
    tally_.bytes[static_cast<std::size_t>(layout.space)] += plan.bytes;
    if (layout.src_pitch != layout.src_page_size || layout.dst_pitch != layout.dst_page_size) {
      tally_.pitched_bytes += plan.bytes;
    }
    for (const BufferPair& pair : plan.pairs) {
      const BufferKind kind = dst_.buffers[pair.dst_buffer].kind;
      if (kind == BufferKind::kIndexKey || kind == BufferKind::kIndexScale) {
        tally_.index_bytes += plan.rows * pair.bytes;
      }
    }
    tally_.resharded += layout.space == RowSpace::kState && !plan.runs.empty() &&
                        world_.base.prefill.tp != world_.base.decode.tp;
  }

  /// Breaks a copy of the part in one way, and checks that the planner and the oracle agree about it.
  bool spoiled_part_agrees(const RankShape& shape, const PairLayout& layout, PartRequest part,
                           std::string& why) {
    ++tally_.spoiled_plans;
    RequestRows& rows = rng_.chance(1, 2) ? part.src : part.dst;
    std::span<const std::uint32_t>& list = layout.space == RowSpace::kWindow ? rows.window_pages : rows.pages;
    std::vector<std::uint32_t> pages(list.begin(), list.end());
    switch (rng_.below(5)) {
      case 0:
        pages.resize(rng_.below(pages.size() + 1));
        break;
      case 1:
        if (!pages.empty()) {
          pages[rng_.below(pages.size())] = rng_.chance(1, 2) ? 0xFFFFFFFFu : 1000;
        }
        break;
      case 2:
        (layout.space == RowSpace::kWindow ? rows.window_first : rows.first_token) += rng_.between(1, 9);
        break;
      case 3:
        rows.state_slot.reset();
        break;
      default:
        rows.state_slot = 1000;
        break;
    }
    list = pages;
    const auto plan = plan_part(layout, part);
    const bool legal = oracle::part_is_legal(shape, 1000, dst_, 1000, layout.space, part);
    why = fmt::format("the oracle calls a spoiled part {}, the planner says: {}", legal ? "legal" : "illegal",
                      plan ? "fine" : plan.error().message);
    return plan.has_value() == legal && (plan || !plan.error().message.empty());
  }

  /// Breaks one buffer that takes part in one of two ways, on either side: pair_layouts() must refuse, but
  /// for a draft layer that one side lacks.
  bool spoiled_shape_is_refused(const RankShape& src, const std::vector<PairLayout>& layouts,
                                std::string& why) {
    std::vector<BufferPair> pairs;
    for (const PairLayout& layout : layouts) {
      pairs.insert(pairs.end(), layout.pairs.begin(), layout.pairs.end());
    }
    if (pairs.empty()) {
      return true;
    }
    ++tally_.spoiled_shapes;
    const BufferPair pair = rng_.pick(pairs);
    RankShape shapes[2] = {src, dst_};
    const std::size_t side = rng_.below(2);
    RankShape& spoiled = shapes[side];
    const std::size_t at = side == 0 ? pair.src_buffer : pair.dst_buffer;
    BufferShape& buffer = spoiled.buffers[at];
    const std::uint32_t rows = buffer.rows_of_page(spoiled.page_size);
    bool accepted = false;
    const std::uint64_t way = rng_.below(5);
    if (way == 0) {
      accepted = buffer.layer >= world_.base.model.hidden_layers;
      spoiled.buffers.erase(spoiled.buffers.begin() + static_cast<std::ptrdiff_t>(at));
    } else if (way == 1) {
      buffer.row_bytes += rng_.chance(1, 2) ? 1 : buffer.row_bytes;
    } else if (way == 2) {
      buffer.page_rows = rows + 1;
      buffer.pitch = 0;
    } else if (way == 3) {
      spoiled.buffers.push_back(buffer);
    } else {
      // Pages that overlap; where a page is one row, a pool beyond all bytes.
      buffer.pitch = rows - 1;
      buffer.pages = rows == 1 ? std::uint64_t{1} << 63 : std::max<std::uint64_t>(buffer.pages, 2);
    }
    const auto layout = pair_layouts(world_.base.model, shapes[0], shapes[1]);
    why = fmt::format("a pool spoiled in way {} is {}", way, layout ? "accepted" : layout.error().message);
    return layout.has_value() == accepted && (layout || !layout.error().message.empty());
  }

  Rng& rng_;
  const HybridWorld& world_;
  const Request& request_;
  const Route& route_;
  HybridTally& tally_;
  Interval window_;
  Names into_;
  RankShape dst_;
  DecodeTargets targets_;
};

}  // namespace

HybridWorld random_hybrid(Rng& rng) {
  HybridWorld world;
  const Features features{rng.chance(1, 2), rng.chance(1, 2), rng.chance(1, 3)};
  World& base = world.base;
  base.model = random_hybrid_model(rng, features);
  base.prefill = random_topology(rng, base.model);
  base.decode = random_topology(rng, base.model);
  if (rng.chance(1, 2)) {
    base.prefill.dcp = 1;
  }
  if (rng.chance(7, 8)) {
    base.decode.cp_split = CpSplit::kNone;
  }
  if (!base.model.state_layers.empty()) {
    random_state(rng, base.prefill.tp, base.decode.tp, base.model);
  }
  base.prefill_page = rng.between32(1, 4);
  base.decode_page = rng.between32(1, 4);
  world.prefill_draft = base.model.draft_layers > 0 && rng.chance(3, 4);
  world.decode_draft = base.model.draft_layers > 0 && rng.chance(3, 4);
  return world;
}

std::string describe(const HybridWorld& world) {
  const ModelGeometry& model = world.base.model;
  std::string text = describe(world.base);
  text += fmt::format(", {} token, {} window ({}), {} state and {} draft layers, index {}",
                      model.kv_layers.size(), model.sliding_layers.size(), model.sliding_window,
                      model.state_layers.size(), model.draft_layers, model.index_head_dim);
  return text;
}

std::string HybridTally::to_string() const {
  return fmt::format(
      "{} cases, {} refused, {} transfers, {} plans, bytes: {} tokens, {} draft, {} window, {} state, {} "
      "index, {} pitched; {} resharded states, {} bare stages, {} spoiled plans, {} spoiled shapes",
      cases, refused, transfers, plans, bytes[0], bytes[1], bytes[2], bytes[3], index_bytes, pitched_bytes,
      resharded, bare_stages, spoiled_plans, spoiled_shapes);
}

bool hybrid_refusals_agree(Rng& rng, const HybridWorld& world, bool& legal, std::string& why) {
  const World& base = world.base;
  legal = oracle::hybrid_pair_is_legal(base.model, base.prefill, base.prefill_page, base.decode,
                                       base.decode_page);
  const auto shape = [&](bool prefill) {
    const PoolPages one{1, 1, 1, 1};
    return legal ? random_shape(rng, world, prefill, {}, one)
                 : RankShape{prefill ? base.prefill : base.decode,
                             {},
                             prefill ? base.prefill_page : base.decode_page,
                             {}};
  };
  const auto layouts = pair_layouts(base.model, shape(true), shape(false));
  why = fmt::format("the oracle calls it {}; pair_layouts: {}", legal ? "legal" : "illegal",
                    layouts ? "accepted" : layouts.error().message);
  return layouts.has_value() == legal && (layouts || !layouts.error().message.empty());
}

bool hybrid_transfer_is_right(Rng& rng, const HybridWorld& world, const Request& request, const Route& route,
                              HybridTally& tally, std::string& why) {
  ++tally.transfers;
  return HybridTransfer(rng, world, request, route, tally).run(why);
}

}  // namespace kvferry::test
