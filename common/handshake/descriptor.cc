#include "common/handshake/descriptor.h"

#include "common/base/check.h"
#include "common/handshake/descriptor_json.h"
#include "common/handshake/json_reader.h"

namespace kvferry {
namespace {

using nlohmann::json;
using Limits = DescriptorLimits;

json model_to_json(const ModelIdentity& model) {
  return {{"name", model.name}, {"revision", model.revision}, {"hash", model.hash}};
}

json state_to_json(const std::vector<StateTensor>& state) {
  json out = json::array();
  for (const StateTensor& tensor : state) {
    out.push_back({{"kind", to_string(tensor.kind)},
                   {"outer", tensor.outer},
                   {"blocks", tensor.blocks},
                   {"element_bytes", tensor.element_bytes}});
  }
  return out;
}

json geometry_to_json(const ModelGeometry& geometry) {
  return {{"name", geometry.name},
          {"attention", to_string(geometry.attention)},
          {"hidden_layers", geometry.hidden_layers},
          {"kv_layers", geometry.kv_layers},
          {"sliding_layers", geometry.sliding_layers},
          {"sliding_window", geometry.sliding_window},
          {"kv_heads", geometry.kv_heads},
          {"head_dim", geometry.head_dim},
          {"v_head_dim", geometry.v_head_dim},
          {"latent_dim", geometry.latent_dim},
          {"rope_dim", geometry.rope_dim},
          {"index_head_dim", geometry.index_head_dim},
          {"hidden_size", geometry.hidden_size},
          {"draft_layers", geometry.draft_layers},
          {"state_layers", geometry.state_layers},
          {"state", state_to_json(geometry.state)},
          {"dtype", to_string(geometry.dtype)}};
}

json rank_to_json(const RankDescription& rank) {
  json out = {{"index", rank.index},
              {"coord",
               {{"tp", rank.coord.tp}, {"pp", rank.coord.pp}, {"cp", rank.coord.cp}, {"dp", rank.coord.dp}}}};
  if (rank.address) {
    out["address"] = rank.address->to_string();
  }
  json& buffers = out["buffers"] = json::array();
  for (const BufferDescription& buffer : rank.buffers) {
    buffers.push_back({{"layer", buffer.layer},
                       {"kind", to_string(buffer.kind)},
                       {"item_len", buffer.item_len},
                       {"pages", buffer.pages}});
  }
  json& aux = out["aux"] = json::array();
  for (const AuxDescription& entry : rank.aux) {
    aux.push_back({{"name", entry.name}, {"width", entry.width}, {"slots", entry.slots}});
  }
  return out;
}

json fabric_to_json(const FabricDescription& fabric) {
  json data = json::parse(fabric.data, nullptr, false);
  KVF_CHECK(data.is_object());
  return {{"kind", fabric.kind}, {"data", std::move(data)}};
}

/// Reads a required text field through a parser of names; on failure `out` keeps its value.
template <class T>
void named(JsonObject& object, std::string_view key, Result<T> (*parse)(std::string_view), T& out) {
  const json* value = object.find(key, true);
  if (value == nullptr) {
    return;
  }
  if (!value->is_string() || value->get_ref<const std::string&>().size() > Limits::kText) {
    object.wrong(key, fmt::format("expected a name, got {}", brief(*value)));
    return;
  }
  if (auto parsed = parse(value->get_ref<const std::string&>())) {
    out = *parsed;
  } else {
    object.wrong(key, parsed.error().message);
  }
}

/// A size that one attention kind needs and the other leaves out or writes as 0.
std::uint32_t dimension(JsonObject& object, std::string_view key, bool needed) {
  return needed ? object.number32(key, 1, Limits::kDimension)
                : object.number32_or(key, 0, Limits::kDimension, 0);
}

Result<Role> parse_role(std::string_view text) {
  if (text == to_string(Role::kPrefill)) {
    return Role::kPrefill;
  }
  if (text == to_string(Role::kDecode)) {
    return Role::kDecode;
  }
  return fail(Code::kInvalid, "expected prefill or decode, got '{}'", text);
}

ModelIdentity model_from_json(JsonObject object) {
  return {.name = object.text_or("name", Limits::kText, ""),
          .revision = object.text_or("revision", Limits::kText, ""),
          .hash = object.text_or("hash", Limits::kText, "")};
}

/// Layer ids must ascend: the planner and the rules search them, and a repeated layer has no meaning.
std::vector<std::uint32_t> layers_from_json(JsonObject& object, std::string_view key) {
  std::vector<std::uint32_t> layers = object.numbers32_or_empty(key, Limits::kLayers - 1, Limits::kLayers);
  for (std::size_t i = 1; i < layers.size(); ++i) {
    if (layers[i] <= layers[i - 1]) {
      object.wrong(key, fmt::format("layer ids must ascend, but {} follows {}", layers[i], layers[i - 1]));
      break;
    }
  }
  return layers;
}

std::vector<StateTensor> state_from_json(JsonObject& object) {
  std::vector<StateTensor> out;
  const json& list = object.array("state", Limits::kStateTensors);
  for (std::size_t i = 0; i < list.size(); ++i) {
    JsonObject item(list[i], element_path(object.path_of("state"), i), object.errors());
    StateTensor tensor;
    named<BufferKind>(item, "kind", parse_buffer_kind, tensor.kind);
    tensor.outer = item.number32("outer", 1, Limits::kDimension);
    tensor.blocks = item.numbers32_or_empty("blocks", UINT32_MAX, Limits::kStateBlocks);
    tensor.element_bytes = item.number32("element_bytes", 1, UINT32_MAX);
    out.push_back(std::move(tensor));
  }
  return out;
}

ModelGeometry geometry_from_json(JsonObject object) {
  ModelGeometry out;
  out.name = object.text_or("name", Limits::kText, "");
  named<AttentionKind>(object, "attention", parse_attention_kind, out.attention);
  out.hidden_layers = object.number32("hidden_layers", 1, Limits::kLayers);
  object.find("kv_layers", true);
  out.kv_layers = layers_from_json(object, "kv_layers");
  if (!out.kv_layers.empty() && out.kv_layers.back() >= out.hidden_layers) {
    object.wrong("kv_layers", fmt::format("layer {} is not below hidden_layers {}", out.kv_layers.back(),
                                          out.hidden_layers));
  }
  out.sliding_layers = layers_from_json(object, "sliding_layers");
  out.sliding_window = object.number32_or("sliding_window", 0, UINT32_MAX, 0);
  out.kv_heads = object.number32("kv_heads", 1, Limits::kDimension);
  const bool mla = out.attention == AttentionKind::kMla;
  out.head_dim = dimension(object, "head_dim", !mla);
  out.v_head_dim = dimension(object, "v_head_dim", !mla);
  out.latent_dim = dimension(object, "latent_dim", mla);
  out.rope_dim = dimension(object, "rope_dim", false);
  out.index_head_dim = object.number32_or("index_head_dim", 0, Limits::kDimension, 0);
  out.hidden_size = object.number32_or("hidden_size", 0, UINT32_MAX, 0);
  out.draft_layers = object.number32_or("draft_layers", 0, Limits::kLayers, 0);
  if (object.find("state_layers", false) != nullptr) {
    out.state_layers = layers_from_json(object, "state_layers");
    out.state = state_from_json(object);
  }
  named<Dtype>(object, "dtype", parse_dtype, out.dtype);
  return out;
}

Topology topology_from_json(JsonObject object) {
  Topology out;
  out.tp = object.number32("tp", 1, Limits::kParallel);
  out.pp = object.number32("pp", 1, Limits::kParallel);
  out.cp = object.number32("cp", 1, Limits::kParallel);
  out.dp = object.number32("dp", 1, Limits::kParallel);
  out.dcp = object.number32("dcp", 1, Limits::kParallel);
  if (object.find("cp_split", false) != nullptr) {
    named<CpSplit>(object, "cp_split", parse_cp_split, out.cp_split);
  }
  out.dcp_interleave = object.number32_or("dcp_interleave", 1, kDcpInterleaveMax, 1);
  out.pp_layers = object.numbers32_or_empty("pp_layers", Limits::kLayers, Limits::kParallel);
  // 4096^4 is 2^48, so the product itself cannot overflow.
  const std::uint64_t total = std::uint64_t{out.tp} * out.pp * out.cp * out.dp;
  if (total > Limits::kRanksTotal) {
    object.wrong(
        "tp", fmt::format("tp*pp*cp*dp is {}, more than the {} ranks allowed", total, Limits::kRanksTotal));
  }
  return out;
}

BufferDescription buffer_from_json(JsonObject object) {
  BufferDescription out;
  out.layer = object.number32("layer", 0, Limits::kLayers - 1);
  named<BufferKind>(object, "kind", parse_buffer_kind, out.kind);
  out.item_len = object.number("item_len", 1, Limits::kItemLen);
  out.pages = object.number("pages", 1, Limits::kPages);
  return out;
}

AuxDescription aux_from_json(JsonObject object) {
  return {.name = object.text("name", 1, Limits::kText),
          .width = object.number("width", 1, Limits::kItemLen),
          .slots = object.number("slots", 1, Limits::kPages)};
}

std::optional<HostPort> address_from_json(JsonObject& object) {
  const json* value = object.find("address", false);
  if (value == nullptr || value->is_null()) {
    return std::nullopt;
  }
  const std::string text = object.text("address", 1, Limits::kText);
  if (text.empty()) {
    return std::nullopt;
  }
  auto address = parse_host_port(text, std::nullopt);
  if (!address) {
    object.wrong("address", address.error().message);
    return std::nullopt;
  }
  return *std::move(address);
}

RankDescription rank_from_json(JsonObject object) {
  RankDescription out;
  out.index = object.number32("index", 0, static_cast<std::uint32_t>(Limits::kRanksTotal - 1));
  JsonObject coord = object.object("coord");
  out.coord.tp = coord.number32("tp", 0, Limits::kParallel - 1);
  out.coord.pp = coord.number32("pp", 0, Limits::kParallel - 1);
  out.coord.cp = coord.number32("cp", 0, Limits::kParallel - 1);
  out.coord.dp = coord.number32("dp", 0, Limits::kParallel - 1);
  out.address = address_from_json(object);
  const json& buffers = object.array("buffers", Limits::kBuffers);
  out.buffers.reserve(buffers.size());
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    out.buffers.push_back(buffer_from_json(
        JsonObject(buffers[i], element_path(object.path_of("buffers"), i), object.errors())));
  }
  const json& aux = object.array_or_empty("aux", Limits::kAux);
  for (std::size_t i = 0; i < aux.size(); ++i) {
    out.aux.push_back(
        aux_from_json(JsonObject(aux[i], element_path(object.path_of("aux"), i), object.errors())));
  }
  return out;
}

FabricDescription fabric_from_json(JsonObject object) {
  FabricDescription out;
  out.kind = object.text("kind", 1, Limits::kText);
  if (const json* data = object.find("data", false)) {
    if (!data->is_object()) {
      object.wrong("data", fmt::format("expected an object, got {}", brief(*data)));
      return out;
    }
    out.data = dump_json(*data);
    if (out.data.size() > Limits::kFabricData) {
      object.wrong("data", fmt::format("has {} bytes, more than the {} allowed", out.data.size(),
                                       Limits::kFabricData));
    }
  }
  return out;
}

std::vector<std::string> components_from_json(JsonObject& object) {
  const json& values = object.array_or_empty("state_components", Limits::kComponents);
  std::vector<std::string> out;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const bool good = values[i].is_string() && !values[i].get_ref<const std::string&>().empty() &&
                      values[i].get_ref<const std::string&>().size() <= Limits::kText;
    if (!good) {
      object.errors().add(
          element_path(object.path_of("state_components"), i),
          fmt::format("expected a text of 1 to {} bytes, got {}", Limits::kText, brief(values[i])));
      continue;
    }
    out.push_back(values[i].get<std::string>());
  }
  return out;
}

std::map<std::string, std::uint64_t> limits_from_json(JsonObject& object) {
  std::map<std::string, std::uint64_t> out;
  const json* value = object.find("limits", false);
  if (value == nullptr) {
    return out;
  }
  if (!value->is_object() || value->size() > Limits::kLimits) {
    object.wrong("limits", fmt::format("expected an object of at most {} numbers, got {} with {} fields",
                                       Limits::kLimits, brief(*value), value->size()));
    return out;
  }
  for (const auto& [key, number] : value->items()) {
    if (key.size() > Limits::kText) {
      object.wrong("limits",
                   fmt::format("a name has {} bytes, more than the {} allowed", key.size(), Limits::kText));
      continue;
    }
    auto read = json_number(number, 0, kJsonIntegerMax);
    if (!read) {
      object.wrong(fmt::format("limits.{}", key), read.error().message);
      continue;
    }
    out.emplace(key, *read);
  }
  return out;
}

}  // namespace

std::string_view to_string(Role role) {
  return role == Role::kPrefill ? "prefill" : "decode";
}

json topology_to_json(const Topology& topology) {
  return {{"tp", topology.tp},
          {"pp", topology.pp},
          {"cp", topology.cp},
          {"cp_split", to_string(topology.cp_split)},
          {"dp", topology.dp},
          {"dcp", topology.dcp},
          {"dcp_interleave", topology.dcp_interleave},
          {"pp_layers", topology.pp_layers}};
}

json descriptor_to_json(const Descriptor& descriptor) {
  json out = {{"role", to_string(descriptor.role)},
              {"protocol_min", descriptor.protocol_min},
              {"protocol_max", descriptor.protocol_max},
              {"build", descriptor.build},
              {"epoch", to_hex16(descriptor.epoch)},
              {"instance", descriptor.instance},
              {"host_id", descriptor.host_id},
              {"model", model_to_json(descriptor.model)},
              {"geometry", geometry_to_json(descriptor.geometry)},
              {"page_size", descriptor.page_size},
              {"topology", topology_to_json(descriptor.topology)},
              {"state_components", descriptor.state_components},
              {"limits", json::object()}};
  for (const auto& [name, value] : descriptor.limits) {
    out["limits"][name] = value;
  }
  json& ranks = out["ranks"] = json::array();
  for (const RankDescription& rank : descriptor.ranks) {
    ranks.push_back(rank_to_json(rank));
  }
  json& fabrics = out["fabrics"] = json::array();
  for (const FabricDescription& fabric : descriptor.fabrics) {
    fabrics.push_back(fabric_to_json(fabric));
  }
  return out;
}

Descriptor descriptor_from_json(JsonObject object) {
  Descriptor out;
  named<Role>(object, "role", parse_role, out.role);
  out.protocol_min = object.number32("protocol_min", 1, UINT32_MAX);
  out.protocol_max = object.number32("protocol_max", 1, UINT32_MAX);
  if (out.protocol_max < out.protocol_min) {
    object.wrong("protocol_max",
                 fmt::format("{} is below protocol_min {}", out.protocol_max, out.protocol_min));
  }
  out.build = object.text_or("build", Limits::kText, "");
  out.epoch = object.hex16("epoch");
  out.instance = object.text_or("instance", Limits::kText, "");
  out.host_id = object.text_or("host_id", Limits::kText, "");
  if (object.find("model", false) != nullptr) {
    out.model = model_from_json(object.object("model"));
  }
  out.geometry = geometry_from_json(object.object("geometry"));
  out.page_size = object.number32("page_size", 1, Limits::kPageSize);
  out.topology = topology_from_json(object.object("topology"));
  out.state_components = components_from_json(object);
  const json& ranks = object.array("ranks", Limits::kRanks);
  out.ranks.reserve(ranks.size());
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    out.ranks.push_back(
        rank_from_json(JsonObject(ranks[i], element_path(object.path_of("ranks"), i), object.errors())));
  }
  const json& fabrics = object.array("fabrics", Limits::kFabrics);
  for (std::size_t i = 0; i < fabrics.size(); ++i) {
    out.fabrics.push_back(fabric_from_json(
        JsonObject(fabrics[i], element_path(object.path_of("fabrics"), i), object.errors())));
  }
  out.limits = limits_from_json(object);
  return out;
}

std::string encode_descriptor(const Descriptor& descriptor) {
  return dump_json(descriptor_to_json(descriptor));
}

Result<Descriptor> decode_descriptor(std::string_view text) {
  KVF_TRY(const json document, parse_outside_json(text, Limits::kBytes, "descriptor"));
  JsonErrors errors;
  Descriptor out = descriptor_from_json(JsonObject(document, "", errors));
  if (!errors.empty()) {
    return fail(errors.error("descriptor"));
  }
  return out;
}

}  // namespace kvferry
