#include <catch2/catch.hpp>
#include <iostream>
#include <nlohmann/json.hpp>

#include "common/handshake/descriptor.h"
#include "samples.h"

using namespace kvferry;
using Catch::Contains;
using nlohmann::json;

namespace {

json good() {
  return json::parse(
      encode_descriptor(samples::daemon(Role::kPrefill, samples::mha_model(), samples::layout("tp=2"), 64)));
}

std::string error_of(const json& document) {
  const auto result = decode_descriptor(document.dump());
  REQUIRE_FALSE(result.has_value());
  CHECK(result.error().code == Code::kInvalid);
  return result.error().message;
}

}  // namespace

TEST_CASE("a descriptor survives its JSON form for random values in every field") {
  const std::uint64_t seed = samples::seed();
  std::cout << "seed " << std::hex << seed << std::dec << "\n";
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  for (int i = 0; i < 1500; ++i) {
    const Descriptor original = samples::random_descriptor(random);
    const std::string text = encode_descriptor(original);
    const auto decoded = decode_descriptor(text);
    if (!decoded) {
      FAIL(decoded.error().message << "\n" << text);
    }
    if (!samples::same(original, *decoded)) {
      FAIL(text);
    }
  }
}

TEST_CASE("a descriptor of a newer peer with unknown keys is read") {
  json document = good();
  document["invented_later"] = {{"a", 1}};
  document["geometry"]["invented_later"] = true;
  document["ranks"][0]["invented_later"] = json::array({1, 2});
  CHECK(decode_descriptor(document.dump()).has_value());
}

TEST_CASE("a wrong field of a descriptor is named by its path with what was found") {
  struct Case {
    const char* pointer;
    json value;
    const char* expected;
  };
  const Case cases[] = {
      {"/role", "router", "role: expected prefill or decode, got 'router'"},
      {"/epoch", 17, "epoch: expected 16 hexadecimal digits, got 17"},
      {"/epoch", "12", "epoch: expected 16 hexadecimal digits, got '12'"},
      {"/epoch", "00000000000000g0", "epoch: expected 16 hexadecimal digits"},
      {"/protocol_max", 0, "protocol_max: expected an integer from 1 to"},
      {"/page_size", -1, "page_size: expected an integer from 1 to 65536, got -1"},
      {"/page_size", 16.0, "page_size: expected an integer from 1 to 65536, got 16.0"},
      {"/page_size", true, "page_size: expected an integer from 1 to 65536, got true"},
      {"/page_size", "64", "page_size: expected an integer from 1 to 65536, got \"64\""},
      {"/page_size", std::uint64_t{1} << 53, "page_size: expected an integer"},
      {"/geometry/dtype", "bf17", "geometry.dtype: "},
      {"/geometry/kv_layers", json::array({0, 2, 2, 3}), "geometry.kv_layers: layer ids must ascend"},
      {"/geometry/kv_layers", json::array({0, 4}),
       "geometry.kv_layers: layer 4 is not below hidden_layers 4"},
      {"/geometry/kv_layers", json::array({0, "x"}), "geometry.kv_layers[1]: expected an integer"},
      {"/geometry/head_dim", 0, "geometry.head_dim: expected an integer from 1"},
      {"/topology/tp", 0, "topology.tp: expected an integer from 1 to 4096, got 0"},
      {"/topology/dcp_interleave", 65537, "topology.dcp_interleave: expected an integer from 1 to 65536"},
      {"/ranks", json::object(), "ranks: expected an array, got an object"},
      {"/ranks/1/buffers/3/item_len", 0, "ranks[1].buffers[3].item_len: expected an integer from 1"},
      {"/ranks/1/buffers/3/item_len", std::uint64_t{1} << 32, "ranks[1].buffers[3].item_len: expected"},
      {"/ranks/0/buffers/0/kind", "both", "ranks[0].buffers[0].kind: "},
      {"/ranks/0/coord", 3, "ranks[0].coord: expected an object, got 3"},
      {"/ranks/0/address", "node:99999", "ranks[0].address: "},
      {"/ranks/0/address", "node", "ranks[0].address: "},
      {"/ranks/0/aux/0/name", "", "ranks[0].aux[0].name: expected a text of 1 to 256 bytes"},
      {"/ranks/0/aux/1/width", nullptr, "ranks[0].aux[1].width: expected an integer from 1"},
      {"/state_components", json::array({"mamba", 5}), "state_components[1]: expected a text"},
      {"/fabrics/0/data", json::array(), "fabrics[0].data: expected an object, got an array of 0"},
      {"/limits/inflight", (std::uint64_t{1} << 53) + 1, "limits.inflight: expected an integer from 0 to"},
      {"/limits", json::array({1}), "limits: expected an object"},
      {"/build", std::string(257, 'x'), "build: expected a text of 0 to 256 bytes, got 257"},
  };
  for (const Case& one : cases) {
    json document = good();
    document[json::json_pointer(one.pointer)] = one.value;
    CAPTURE(one.pointer);
    CHECK_THAT(error_of(document), Contains(one.expected));
  }
}

TEST_CASE("a missing field of a descriptor is named") {
  for (const char* key : {"role", "protocol_min", "protocol_max", "epoch", "geometry", "page_size",
                          "topology", "ranks", "fabrics"}) {
    json document = good();
    document.erase(key);
    CHECK_THAT(error_of(document), Contains(std::string(key)) && Contains("missing"));
  }
}

TEST_CASE("every wrong field of a descriptor is in the one answer") {
  json document = good();
  document["page_size"] = 0;
  document["epoch"] = "x";
  document["topology"]["pp"] = 1.5;
  CHECK_THAT(error_of(document), Contains("page_size: ") && Contains("epoch: ") && Contains("topology.pp: "));

  for (json& buffer : document["ranks"][0]["buffers"]) {
    buffer["pages"] = 0;
    buffer["item_len"] = 0;
  }
  CHECK_THAT(error_of(document), Contains("; and 11 more"));
}

TEST_CASE("a descriptor beyond its bounds is refused") {
  SECTION("bytes") {
    const std::string text(DescriptorLimits::kBytes + 1, ' ');
    CHECK_THAT(decode_descriptor(text).error().message,
               Contains("4194305 bytes, more than the 4194304 allowed"));
  }
  SECTION("nesting, without touching the stack") {
    const std::string deep = std::string(500000, '[') + std::string(500000, ']');
    CHECK_THAT(decode_descriptor(deep).error().message, Contains("nested 500000 levels"));
    json document = good();
    document["fabrics"][0]["data"]["x"] = "[[[[ brackets in a text do not count ]]]]" + std::string(100, '{');
    CHECK(decode_descriptor(document.dump()).has_value());
  }
  SECTION("ranks of the whole side") {
    json document = good();
    document["topology"]["tp"] = 4096;
    document["topology"]["dp"] = 17;
    CHECK_THAT(error_of(document), Contains("tp*pp*cp*dp is 69632, more than the 65536 ranks allowed"));
  }
  SECTION("array lengths") {
    json document = good();
    document["fabrics"] = json::array();
    for (int i = 0; i < 17; ++i) {
      document["fabrics"].push_back({{"kind", "tcp"}});
    }
    CHECK_THAT(error_of(document), Contains("fabrics: has 17 elements, more than the 16 allowed"));
  }
}

TEST_CASE("no truncation and no mutation of a descriptor crashes or passes as out of range") {
  const std::string text =
      encode_descriptor(samples::daemon(Role::kPrefill, samples::mla_model(), samples::layout("tp=2")));
  for (std::size_t size = 0; size < text.size(); ++size) {
    REQUIRE_FALSE(decode_descriptor(std::string_view(text).substr(0, size)).has_value());
  }
  const std::uint64_t seed = samples::seed();
  std::cout << "seed " << std::hex << seed << std::dec << "\n";
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  const Descriptor decode =
      samples::daemon(Role::kDecode, samples::mla_model(), samples::layout("tp=4,dcp=4"));
  for (int i = 0; i < 20000; ++i) {
    const auto result = decode_descriptor(samples::mutate(text, random));
    if (!result) {
      REQUIRE(result.error().code == Code::kInvalid);
      REQUIRE_FALSE(result.error().message.empty());
      continue;
    }
    REQUIRE(result->page_size >= 1);
    REQUIRE(result->topology.tp >= 1);
    REQUIRE(samples::same(*decode_descriptor(encode_descriptor(*result)), *result));
    // Whatever was accepted as well formed must be safe for every rule.
    (void)evaluate(*result, decode);
  }
}
