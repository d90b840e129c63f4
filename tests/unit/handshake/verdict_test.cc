#include <catch2/catch.hpp>
#include <iostream>
#include <nlohmann/json.hpp>

#include "common/handshake/verdict.h"
#include "samples.h"

using namespace kvferry;
using Catch::Contains;
using nlohmann::json;
using samples::layout;

namespace {

Verdict accepted() {
  const samples::Pair pair = samples::pair(samples::mla_model(), layout("tp=4,dp=2"), layout("tp=2"));
  return judge(pair.prefill, pair.decode, 0xABCDEF0123456789ULL);
}

std::string error_of(const json& document) {
  const auto result = decode_verdict(document.dump());
  REQUIRE_FALSE(result.has_value());
  return result.error().message;
}

}  // namespace

TEST_CASE("an accepted pair gets fabric, protocol, session and the targets of each local decode rank") {
  const Verdict verdict = accepted();
  CHECK(verdict.accepted);
  CHECK(verdict.fabric == "ucx");
  CHECK(verdict.protocol == 1);
  CHECK(verdict.session == 0xABCDEF0123456789ULL);
  REQUIRE(verdict.rank_map.size() == 4);
  // Two of four prefill TP ranks hold the same latent for each decode rank and take turns by room.
  CHECK(verdict.rank_map[0] == RankMapEntry{0, 0, {0, 1}, {}, 1, 1});
  CHECK(verdict.rank_map[1] == RankMapEntry{0, 1, {4, 5}, {}, 1, 1});
  CHECK(verdict.rank_map[2] == RankMapEntry{1, 0, {2, 3}, {}, 1, 1});
  CHECK(verdict.rank_map[3] == RankMapEntry{1, 1, {6, 7}, {}, 1, 1});

  const samples::Pair heads = samples::pair(samples::mha_model(), layout("tp=8"), layout("tp=2"));
  const Verdict slices = judge(heads.prefill, heads.decode, 1);
  CHECK(slices.rank_map[1] == RankMapEntry{1, 0, {4, 5, 6, 7}, {4, 5, 6, 7}, 1, 4});
}

TEST_CASE("a refused pair gets every violation and nothing to connect with") {
  samples::Pair pair = samples::pair(samples::mla_model(), layout("tp=4"), layout("tp=2"));
  pair.decode.page_size = 32;
  pair.decode.fabrics.clear();
  const Verdict verdict = judge(pair.prefill, pair.decode, 9);
  CHECK_FALSE(verdict.accepted);
  CHECK(verdict.session == 0);
  CHECK(verdict.rank_map.empty());
  CHECK(samples::rules_of(verdict.violations) ==
        std::vector<std::string>{"fabrics", "page_size", "item_len", "row_bytes"});
  const auto read = decode_verdict(encode_verdict(verdict));
  REQUIRE(read.has_value());
  CHECK(read->violations == verdict.violations);
}

TEST_CASE("a verdict survives its JSON form") {
  Verdict verdict = accepted();
  verdict.violations.push_back(
      {"model_revision", Severity::kWarning, "model.revision", "r1", "r2", "m", "f"});
  const auto read = decode_verdict(encode_verdict(verdict));
  REQUIRE(read.has_value());
  CHECK(read->accepted);
  CHECK(read->violations == verdict.violations);
  CHECK(samples::same(read->prefill, verdict.prefill));
  CHECK(read->session == verdict.session);
  CHECK(read->fabric == verdict.fabric);
  CHECK(read->protocol == verdict.protocol);
  CHECK(read->rank_map == verdict.rank_map);
}

TEST_CASE("a violation's JSON has exactly the documented keys") {
  const json document = violation_to_json(
      {"page_size", Severity::kError, "page_size", "64", "32", "Page size mismatch", "fix it"});
  CHECK(document.dump() ==
        R"({"decode":"32","field":"page_size","fix":"fix it","message":"Page size mismatch",)"
        R"("prefill":"64","rule":"page_size","severity":"error"})");
}

TEST_CASE("a verdict that contradicts itself is refused") {
  const json good = json::parse(encode_verdict(accepted()));
  json document = good;
  document["violations"] =
      json::array({violation_to_json({"dtype", Severity::kError, "f", "a", "b", "m", "x"})});
  CHECK_THAT(error_of(document), Contains("accepted with an error violation"));
  document = good;
  document["accepted"] = false;
  CHECK_THAT(error_of(document), Contains("refused without an error violation"));
  document = good;
  document["fabric"] = "";
  CHECK_THAT(error_of(document), Contains("accepted without fabric"));
  document = good;
  document["prefill"]["role"] = "decode";
  CHECK_THAT(error_of(document), Contains("prefill.role"));
  document = good;
  document["rank_map"][0]["targets"] = json::array({0, 8});
  CHECK_THAT(error_of(document), Contains("rank_map[0].targets[1]: expected an integer from 0 to 7, got 8"));
  document = good;
  document["rank_map"][2]["sources"] = json::array({1});
  CHECK_THAT(error_of(document), Contains("rank_map[2].sources: every source must also be a target"));
  document = good;
  document["prefill"]["ranks"][0]["index"] = "zero";
  CHECK_THAT(error_of(document), Contains("prefill.ranks[0].index: expected an integer"));
  document = good;
  document["violations"] = json::array({{{"rule", "x"}, {"severity", "fatal"}, {"message", "m"}}});
  CHECK_THAT(error_of(document), Contains("violations[0].severity: expected error or warning, got 'fatal'"));
}

TEST_CASE("no truncation and no mutation of a verdict crashes") {
  const std::string text = encode_verdict(accepted());
  for (std::size_t size = 0; size < text.size(); size += 7) {
    REQUIRE_FALSE(decode_verdict(std::string_view(text).substr(0, size)).has_value());
  }
  const std::uint64_t seed = samples::seed();
  std::cout << "seed " << std::hex << seed << std::dec << "\n";
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  for (int i = 0; i < 2000; ++i) {
    if (const auto result = decode_verdict(samples::mutate(text, random)); !result) {
      REQUIRE(result.error().code == Code::kInvalid);
    }
  }
}
