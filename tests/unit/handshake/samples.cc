#include "samples.h"

#include <cstdlib>
#include <stdexcept>

#include "common/plan/plan.h"

namespace kvferry::samples {

ModelGeometry mha_model() {
  ModelGeometry out;
  out.name = "mha-test";
  out.hidden_layers = 4;
  out.kv_layers = {0, 1, 2, 3};
  out.kv_heads = 8;
  out.head_dim = 128;
  out.v_head_dim = 128;
  out.hidden_size = 1024;
  return out;
}

ModelGeometry mla_model() {
  ModelGeometry out;
  out.name = "mla-test";
  out.attention = AttentionKind::kMla;
  out.hidden_layers = 4;
  out.kv_layers = {0, 1, 2, 3};
  out.kv_heads = 1;
  out.latent_dim = 512;
  out.rope_dim = 64;
  out.dtype = Dtype::kFp8E4m3;
  return out;
}

Topology layout(std::string_view text) {
  const auto parsed = parse_topology(text);
  if (!parsed) {
    throw std::runtime_error(parsed.error().message);
  }
  return *parsed;
}

void attach_all(Descriptor& side) {
  side.ranks.clear();
  for (RankIndex index = 0; index < side.topology.rank_count(); ++index) {
    RankDescription rank{.index = index,
                         .coord = side.topology.coord(index),
                         .address = HostPort{"192.0.2.4", static_cast<std::uint16_t>(18998 + index)},
                         .buffers = {},
                         .aux = {{"output_ids", 64, 32}, {"bootstrap_room", 64, 32}}};
    const std::uint32_t draft_rows = rows_of_page(RowSpace::kDraft, side.page_size, side.topology);
    for (const BufferShape& shape :
         rank_buffers(side.geometry, side.topology, rank.coord, 1000, draft_rows)) {
      rank.buffers.push_back({shape.layer, shape.kind,
                              std::uint64_t{shape.row_bytes} * shape.rows_of_page(side.page_size),
                              shape.pages});
    }
    side.ranks.push_back(std::move(rank));
  }
}

Descriptor daemon(Role role, const ModelGeometry& model, const Topology& topology, std::uint32_t page_size) {
  Descriptor out;
  out.role = role;
  out.build = "0.1.0";
  out.epoch = role == Role::kPrefill ? 0xFEDCBA9876543210ULL : 0x0123456789ABCDEFULL;
  out.instance = role == Role::kPrefill ? "prefill-a" : "decode-b";
  out.host_id = role == Role::kPrefill ? "host-a" : "host-b";
  out.model = {.name = model.name, .revision = "r1", .hash = ""};
  out.geometry = model;
  out.page_size = page_size;
  out.topology = topology;
  out.fabrics = {{"ucx", R"({"worker":"AAEC"})"}, {"tcp", R"({"port":7000})"}};
  out.limits = {{"inflight", 64}};
  attach_all(out);
  return out;
}

Pair pair(const ModelGeometry& model, const Topology& prefill, const Topology& decode) {
  return {daemon(Role::kPrefill, model, prefill), daemon(Role::kDecode, model, decode)};
}

namespace {

class Dice {
 public:
  explicit Dice(std::mt19937_64& random) : random_(random) {}

  std::uint64_t number(std::uint64_t low, std::uint64_t high) {
    return std::uniform_int_distribution<std::uint64_t>(low, high)(random_);
  }
  std::uint32_t number32(std::uint32_t low, std::uint32_t high) {
    return static_cast<std::uint32_t>(number(low, high));
  }
  bool coin() { return number(0, 1) == 1; }
  std::string text(std::size_t low) {
    static const char* const kLetters[] = {"a", "Z", "0", " ", "\"", "\\", "\n", "/", "é", "界", "\x01"};
    std::string out;
    for (std::uint64_t left = number(low, 12); left > 0; --left) {
      out += kLetters[number(0, std::size(kLetters) - 1)];
    }
    return out;
  }
  std::vector<std::uint32_t> layers(std::uint32_t below) {
    std::vector<std::uint32_t> out;
    for (std::uint32_t layer = 0; layer < below; ++layer) {
      if (coin()) {
        out.push_back(layer);
      }
    }
    return out;
  }

 private:
  std::mt19937_64& random_;
};

ModelGeometry random_geometry(Dice& dice) {
  ModelGeometry out;
  out.name = dice.text(0);
  out.attention = dice.coin() ? AttentionKind::kMla : AttentionKind::kMha;
  out.hidden_layers = dice.number32(1, 90);
  out.kv_layers = dice.layers(out.hidden_layers);
  out.sliding_layers = dice.layers(out.hidden_layers);
  out.sliding_window = dice.number32(0, UINT32_MAX);
  out.kv_heads = dice.number32(1, 1U << 20);
  out.head_dim = dice.number32(1, 1U << 20);
  out.v_head_dim = dice.number32(1, 1U << 20);
  out.latent_dim = dice.number32(1, 1U << 20);
  out.rope_dim = dice.number32(0, 1U << 20);
  out.index_head_dim = dice.number32(0, 1U << 20);
  out.hidden_size = dice.number32(0, UINT32_MAX);
  out.draft_layers = dice.number32(0, 4096);
  out.dtype = static_cast<Dtype>(dice.number(0, 5));
  return out;
}

RankDescription random_rank(Dice& dice) {
  RankDescription out;
  out.index = dice.number32(0, 65535);
  out.coord = {dice.number32(0, 4095), dice.number32(0, 4095), dice.number32(0, 4095),
               dice.number32(0, 4095)};
  if (dice.coin()) {
    out.address =
        HostPort{dice.coin() ? "2001:db8::5" : "node-1", static_cast<std::uint16_t>(dice.number(1, 65535))};
  }
  for (std::uint64_t left = dice.number(0, 6); left > 0; --left) {
    out.buffers.push_back({dice.number32(0, 4095), static_cast<BufferKind>(dice.number(0, 2)),
                           dice.number(1, UINT32_MAX), dice.number(1, INT32_MAX)});
  }
  for (std::uint64_t left = dice.number(0, 3); left > 0; --left) {
    out.aux.push_back({dice.text(1), dice.number(1, UINT32_MAX), dice.number(1, INT32_MAX)});
  }
  return out;
}

bool same_geometry(const ModelGeometry& a, const ModelGeometry& b) {
  const auto fields = [](const ModelGeometry& g) {
    return std::tie(g.name, g.attention, g.hidden_layers, g.kv_layers, g.sliding_layers, g.sliding_window,
                    g.kv_heads, g.head_dim, g.v_head_dim, g.latent_dim, g.rope_dim, g.index_head_dim,
                    g.hidden_size, g.draft_layers, g.dtype);
  };
  return fields(a) == fields(b);
}

}  // namespace

Descriptor random_descriptor(std::mt19937_64& random) {
  Dice dice(random);
  Descriptor out;
  out.role = dice.coin() ? Role::kPrefill : Role::kDecode;
  out.protocol_min = dice.number32(1, 1000);
  out.protocol_max = dice.number32(out.protocol_min, UINT32_MAX);
  out.build = dice.text(0);
  out.epoch = dice.number(0, UINT64_MAX);
  out.instance = dice.text(0);
  out.host_id = dice.text(0);
  out.model = {dice.text(0), dice.text(0), dice.text(0)};
  out.geometry = random_geometry(dice);
  out.page_size = dice.number32(1, 1U << 16);
  out.topology = {dice.number32(1, 16),    dice.number32(1, 16),
                  dice.number32(1, 16),    static_cast<CpSplit>(dice.number32(0, 2)),
                  dice.number32(1, 16),    dice.number32(1, 4096),
                  dice.number32(1, 65536), {}};
  for (std::uint64_t left = dice.number(0, 4); left > 0; --left) {
    out.topology.pp_layers.push_back(dice.number32(0, 4096));
  }
  for (std::uint64_t left = dice.number(0, 3); left > 0; --left) {
    out.state_components.push_back(dice.text(1));
  }
  for (std::uint64_t left = dice.number(0, 4); left > 0; --left) {
    out.ranks.push_back(random_rank(dice));
  }
  for (std::uint64_t left = dice.number(0, 3); left > 0; --left) {
    out.fabrics.push_back({dice.text(1), dice.coin() ? "{}" : R"({"a":[1,2.5,null],"b":{"c":"d"}})"});
  }
  for (std::uint64_t left = dice.number(0, 3); left > 0; --left) {
    out.limits[dice.text(0)] = dice.number(0, std::uint64_t{1} << 53);
  }
  return out;
}

bool same(const Descriptor& a, const Descriptor& b) {
  const auto fields = [](const Descriptor& d) {
    return std::tie(d.role, d.protocol_min, d.protocol_max, d.build, d.epoch, d.instance, d.host_id, d.model,
                    d.page_size, d.topology, d.state_components, d.ranks, d.fabrics, d.limits);
  };
  return fields(a) == fields(b) && same_geometry(a.geometry, b.geometry);
}

std::vector<std::string> rules_of(const std::vector<Violation>& violations) {
  std::vector<std::string> out;
  out.reserve(violations.size());
  for (const Violation& violation : violations) {
    out.push_back(violation.rule);
  }
  return out;
}

const Violation& find(const std::vector<Violation>& violations, const std::string& rule) {
  for (const Violation& violation : violations) {
    if (violation.rule == rule) {
      return violation;
    }
  }
  throw std::runtime_error("no violation of rule " + rule);
}

std::string mutate(std::string text, std::mt19937_64& random) {
  static const std::string kBytes = "{}[]\",:0123456789-+.eE tfn\\u\x80\xff\x01";
  Dice dice(random);
  for (std::uint64_t left = dice.number(1, 3); left > 0 && !text.empty(); --left) {
    const std::size_t at = dice.number(0, text.size() - 1);
    const char byte = kBytes[dice.number(0, kBytes.size() - 1)];
    switch (dice.number(0, 3)) {
      case 0:
        text[at] = byte;
        break;
      case 1:
        text.erase(at, dice.number(1, 8));
        break;
      case 2:
        text.insert(at, 1, byte);
        break;
      default:
        text.insert(at, text.substr(at, dice.number(1, 40)));
        break;
    }
  }
  return text;
}

std::uint64_t seed() {
  const char* text = std::getenv("KVF_SEED");
  return text == nullptr ? std::random_device{}() : std::strtoull(text, nullptr, 16);
}

}  // namespace kvferry::samples
