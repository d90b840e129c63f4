#include "tools/cli/plan/plan_command.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>

#include "common/base/hash.h"
#include "tools/cli/plan/plan_report.h"
#include "tools/cli/plan/row_tokens.h"

using namespace kvferry;
using Catch::Contains;
using nlohmann::json;

namespace {

/// One prefill rank to eight that split the tokens, pages of 128, 67137 tokens.
PlanOptions one_to_eight() {
  PlanOptions options;
  options.prefill = "tp=1";
  options.decode = "tp=8,dcp=8";
  options.page_size = 128;
  options.tokens = 67137;
  return options;
}

PlanOptions stages_to_four() {
  PlanOptions options;
  options.prefill = "tp=8,pp=2";
  options.decode = "tp=4,dcp=4";
  options.tokens = 5000;
  return options;
}

json document(PlanOptions options, int exit_status = 0) {
  options.json = true;
  const PlanOutput output = run_plan(options);
  REQUIRE(output.error.empty());
  REQUIRE(output.exit_status == exit_status);
  return json::parse(output.text);
}

std::string text_of(const PlanOptions& options, int exit_status = 0) {
  const PlanOutput output = run_plan(options);
  REQUIRE(output.error.empty());
  REQUIRE(output.exit_status == exit_status);
  return output.text;
}

std::size_t widest_line(const std::string& text) {
  std::istringstream lines(text);
  std::size_t widest = 0;
  for (std::string line; std::getline(lines, line);) {
    widest = std::max(widest, line.size());
  }
  return widest;
}

std::vector<std::string> keys(const json& object) {
  std::vector<std::string> out;
  for (const auto& [key, value] : object.items()) {
    out.push_back(key);
  }
  return out;
}

}  // namespace

TEST_CASE("67137 tokens from one rank to eight need 525 source and 66 destination pages") {
  const json plan = document(one_to_eight());
  CHECK(plan["supported"] == true);
  CHECK(plan["prefill"]["pages"] == 525);
  CHECK(plan["decode"]["pages"] == 66);
  CHECK(plan["decode"]["virtual_page"] == 1024);
  REQUIRE(plan["decode_tokens"].size() == 8);
  REQUIRE(plan["pairs"].size() == 8);
  for (std::uint32_t rank = 0; rank < 8; ++rank) {
    INFO("decode rank " << rank);
    const std::uint64_t tokens = rank == 0 ? 8393 : 8392;
    CHECK(plan["decode_tokens"][rank] == json{{"rank", rank}, {"tokens", tokens}});
    const json& pair = plan["pairs"][rank];
    CHECK(pair["prefill"] == 0);
    CHECK(pair["decode"] == rank);
    CHECK(pair["rows"] == tokens);
    CHECK(pair["buffers"] == 61);
    CHECK(pair["bytes"] == tokens * 61 * 1152);
    CHECK(pair["runs"] == 525);
    CHECK(pair["naive_writes"] == tokens * 61);
    CHECK(pair["staging_bytes"] == 2 << 20);
  }
  CHECK(plan["total"]["bytes"] == 67137ull * 61 * 1152);
  CHECK(plan["total"]["naive_writes"] == 67137 * 61);
  CHECK(plan["total"]["sources"] == 1);
  CHECK(plan["total"]["balance"] == 1.0);
  const std::string text = text_of(one_to_eight());
  CHECK_THAT(text, Contains("525 pages of 128 tokens"));
  CHECK_THAT(text, Contains("66 pages of 128 tokens"));
  CHECK_THAT(text, Contains("rank 0 owns 8393; ranks 1-7 own 8392 each"));
  CHECK_THAT(text, Contains("supported   yes"));
}

TEST_CASE("one destination page too few refuses the plan and names needed, given and every rank") {
  PlanOptions options = one_to_eight();
  options.decode_pages = 65;
  const json plan = document(options, 1);
  CHECK(plan["supported"] == false);
  CHECK_FALSE(plan.contains("pairs"));
  REQUIRE(plan["findings"].size() == 8);
  for (std::size_t rank = 0; rank < 8; ++rank) {
    const json& finding = plan["findings"][rank];
    CHECK(finding["decode"] == "rank " + std::to_string(rank));
    CHECK_THAT(finding["message"].get<std::string>(), Contains("needed 66, given 65"));
    CHECK(finding["fix"] == "give each decode rank 66 pages (--decode-pages)");
  }
  CHECK_THAT(text_of(options, 1), Contains("supported   no"));
  options.decode_pages = 66;
  CHECK(document(options)["supported"] == true);
}

TEST_CASE("a layout is refused for all of its reasons, with both values and the fix") {
  PlanOptions options;
  options.prefill = "tp=8,dcp=3";
  options.decode = "tp=4,dcp=2,interleave=48,cp=2,cp_split=pages";
  const json plan = document(options, 1);
  std::vector<std::string> rules;
  for (const json& finding : plan["findings"]) {
    rules.push_back(finding["rule"]);
    CHECK_FALSE(finding["fix"].get<std::string>().empty());
    CHECK_FALSE(finding["prefill"].get<std::string>().empty());
    CHECK_FALSE(finding["decode"].get<std::string>().empty());
  }
  CHECK(rules == std::vector<std::string>{"topology", "cp_split", "dcp_interleave"});
  const std::string text = text_of(options, 1);
  CHECK_THAT(plan["findings"][0]["message"].get<std::string>(), Contains("dcp 3 must divide tp 8"));
  CHECK_THAT(text, Contains("supported   no") && Contains("[topology]") && Contains("[cp_split]"));
  CHECK(widest_line(text) <= 110);
}

TEST_CASE("pages of different sizes are planned with a warning") {
  PlanOptions options;
  options.prefill_page_size = 64;
  options.decode_page_size = 16;
  const json plan = document(options);
  CHECK(plan["prefill"]["page_size"] == 64);
  CHECK(plan["decode"]["page_size"] == 16);
  REQUIRE(plan["findings"].size() == 1);
  CHECK(plan["findings"][0]["rule"] == "page_size");
  CHECK(plan["findings"][0]["severity"] == "warning");
}

TEST_CASE("a prefix inside a page of decode is refused, one at a page's edge shortens the plan") {
  PlanOptions options = one_to_eight();
  options.prefix = 100;
  const json refused = document(options, 1);
  REQUIRE(refused["findings"].size() == 1);
  CHECK(refused["findings"][0]["decode"] == "ranks 0-7");
  CHECK_THAT(refused["findings"][0]["message"].get<std::string>(), Contains("100") && Contains("1024"));
  CHECK(refused["findings"][0]["fix"] == "let --prefix be a multiple of 1024, such as 0");
  options.prefix = 2048;
  const json plan = document(options);
  CHECK(plan["total"]["rows"] == 67137 - 2048);
  CHECK(plan["prefill"]["pages"] == 525 - 16);
  CHECK(plan["prefill"]["first_token"] == 2048);
  CHECK(plan["decode"]["pages"] == 64);
  options.prefix = 67137;
  const json nothing = document(options);
  CHECK(nothing["pairs"].empty());
  CHECK(nothing["total"]["bytes"] == 0);
  CHECK_THAT(text_of(options), Contains("nothing moves"));
}

TEST_CASE("wrong usage is exit status 2 and names every problem at once") {
  PlanOptions options;
  options.model = "no-such-model";
  options.dtype = "fp3";
  options.prefill = "tp=0";
  options.decode = "lanes=4";
  options.tokens = 0;
  options.prefix = 7;
  options.room = 0;
  options.decode_pages = kPlanTokensMax + 1;
  const PlanOutput output = run_plan(options);
  CHECK(output.exit_status == 2);
  CHECK(output.text.empty());
  for (const char* option :
       {"--model", "--dtype", "--prefill", "--decode", "--tokens", "--prefix", "--room", "--decode-pages"}) {
    CHECK_THAT(output.error, Contains(option));
  }
  const auto refused = [](const PlanOptions& wrong, const char* word) {
    const PlanOutput out = run_plan(wrong);
    CHECK(out.exit_status == 2);
    CHECK_THAT(out.error, Contains(word));
  };
  PlanOptions wrong;
  wrong.explain = wrong.tokens;
  refused(wrong, "--explain");
  wrong = {};
  wrong.prefill_dp = 1;
  refused(wrong, "--prefill-dp");
  wrong = {};
  wrong.decode = "tp=2048";
  refused(wrong, "--decode");
}

TEST_CASE("the plan hash is the same on every machine and in every run") {
  // The published values of XXH64 with seed 0.
  Hash64 hash;
  CHECK(hash.value() == 0xEF46DB3751D8E999ull);
  hash.add("abc");
  CHECK(hash.value() == 0x44BC2CF5AD770999ull);
  Hash64 numbers;
  numbers.add(std::vector<std::uint64_t>{0x6867666564636261ull, 0x706F6E6D6C6B6A69ull});
  Hash64 bytes;
  bytes.add("abcdefghijklmnop");
  CHECK(numbers.value() == bytes.value());

  const auto hash_of = [](const PlanOptions& options) {
    return document(options)["plan_hash"].get<std::string>();
  };
  // These change only when the planner's answer or the hashed form does, and then every plan is compared.
  CHECK(hash_of(one_to_eight()) == "fcc8dcf9f13f811b");
  CHECK_THAT(text_of(one_to_eight()), Contains("plan hash   fcc8dcf9f13f811b"));
  PlanOptions stages = stages_to_four();
  const std::string first = hash_of(stages);
  CHECK(first == "069192cddf06c1df");
  CHECK(hash_of(stages) == first);
  stages.cost.gigabytes_per_second = 1;
  stages.pages = true;
  CHECK(hash_of(stages) == first);
  stages.dense = true;
  CHECK(hash_of(stages) != first);
  std::map<std::string, int> by_room;
  stages.dense = false;
  for (stages.room = 1; stages.room <= 8; ++stages.room) {
    ++by_room[hash_of(stages)];
  }
  CHECK(by_room.size() == 2);  // two sources hold what each destination needs
}

TEST_CASE("every room moves the same bytes, from sources that share the work") {
  for (Room room = 1; room <= 4; ++room) {
    PlanOptions options = stages_to_four();
    options.room = room;
    const json plan = document(options);
    CHECK(plan["total"]["bytes"] == 5000ull * 70272);
    CHECK(plan["pairs"].size() == 8);
    CHECK(plan["sources"].size() == 8);
    CHECK(plan["total"]["idle_sources"] == 8);
    const double mean = 5000.0 * 70272 / 8;
    double busiest = 0;
    double slowest = 0;
    for (const json& source : plan["sources"]) {
      busiest = std::max(busiest, source["bytes"].get<double>());
      slowest = std::max(slowest, source["seconds"].get<double>());
    }
    CHECK(plan["total"]["balance"].get<double>() == Approx(busiest / mean));
    CHECK(plan["total"]["predicted_seconds"].get<double>() == Approx(slowest));
  }
}

TEST_CASE("the predicted time is bytes over bandwidth and writes times their cost") {
  PlanOptions options = one_to_eight();
  options.cost.gigabytes_per_second = 25;
  options.cost.write_us = 2;
  for (const auto& [fabric, writes] :
       std::map<std::string, std::string>{{"shm", "copies"}, {"tcp", "blocks"}, {"ucx", "puts"}}) {
    options.cost.fabric = fabric;
    const json plan = document(options);
    const json& total = plan["total"];
    CHECK(total["posted"] == total[writes]);
    CHECK(total["predicted_seconds"].get<double>() ==
          Approx(total["bytes"].get<double>() / 25e9 + total[writes].get<double>() * 2e-6));
  }
}

TEST_CASE("dense pages need fewer runs, and the output says which were assumed") {
  PlanOptions options = one_to_eight();
  const json scattered = document(options);
  CHECK_THAT(text_of(options), Contains("scattered"));
  options.dense = true;
  const json dense = document(options);
  CHECK_THAT(text_of(options), Contains("consecutive on both sides"));
  CHECK(scattered["request"]["pages"] == "scattered");
  CHECK(dense["request"]["pages"] == "dense");
  CHECK(dense["total"]["runs"] == 8);
  CHECK(dense["total"]["bytes"] == scattered["total"]["bytes"]);
}

TEST_CASE("the runs of --pages name every token of the plan once, in the rows of its pages") {
  PlanOptions options;
  options.prefill = "tp=2,dcp=2,pp=2";
  options.decode = "tp=3,dcp=3,interleave=2";
  options.prefill_page_size = 8;
  options.decode_page_size = 6;
  options.prefix = 36;
  options.tokens = 300;
  options.pages = true;
  options.limit = 0;
  const json plan = document(options);
  std::map<std::uint64_t, int> seen;
  for (const json& pair : plan["runs"]) {
    const std::uint64_t decode = pair["decode"];
    REQUIRE(pair["runs"].size() == pair["total"].get<std::size_t>());
    for (const json& run : pair["runs"]) {
      std::uint64_t first = ~0ull;
      std::uint64_t last = 0;
      for (std::uint64_t piece = 0; piece < run["count"]; ++piece) {
        for (std::uint64_t row = 0; row < run["rows"]; ++row) {
          const std::uint64_t index =
              run["dst_index"].get<std::uint64_t>() + piece * run["dst_step"].get<std::uint64_t>() + row;
          // Decode rank r holds tokens (t / 2) % 3 == r; the first owned one from 36 on has index 0.
          const std::uint64_t token = 36 + index / 2 * 6 + decode * 2 + index % 2;
          first = std::min(first, token);
          last = std::max(last, token);
          ++seen[token];
          const std::uint64_t src =
              run["src_row"].get<std::uint64_t>() + piece * run["src_step"].get<std::uint64_t>() + row;
          // Prefill's list begins at token 32; page ids are even.
          const std::uint64_t local = (token - 32) / 2;
          REQUIRE(src == local / 8 * 2 * 8 + local % 8);
          REQUIRE(run["dst_row"].get<std::uint64_t>() + piece * run["dst_step"].get<std::uint64_t>() + row ==
                  index / 6 * 2 * 6 + index % 6);
        }
      }
      REQUIRE(run["first_token"] == first);
      REQUIRE(run["last_token"] == last);
    }
  }
  REQUIRE(seen.size() == 300 - 36);
  CHECK(std::all_of(seen.begin(), seen.end(), [](const auto& token) { return token.second == 2; }));
  CHECK(seen.begin()->first == 36);
}

TEST_CASE("a row's token is the inverse of counting owned tokens") {
  for (std::uint32_t count = 1; count <= 5; ++count) {
    for (std::uint32_t interleave = 1; interleave <= 4; ++interleave) {
      for (std::uint32_t rank = 0; rank < count; ++rank) {
        const TokenClass owned{count, rank, interleave};
        std::uint64_t row = 0;
        for (std::uint64_t token = 0; token < 100; ++token) {
          if (owned.owns(token)) {
            REQUIRE(token_of_row(owned, row++) == token);
          }
        }
      }
    }
  }
}

TEST_CASE("the JSON document has the fields that its header names") {
  PlanOptions options = stages_to_four();
  options.pages = true;
  options.limit = 2;
  options.explain = 77;
  const json plan = document(options);
  CHECK(keys(plan) == std::vector<std::string>{"cost", "decode", "decode_tokens", "explain", "findings",
                                               "model", "pairs", "plan_hash", "prefill", "request", "runs",
                                               "sources", "supported", "total"});
  const std::vector<std::string> figures{"blocks",       "bytes",         "copies", "naive_writes",
                                         "packed_bytes", "posted",        "puts",   "rows",
                                         "runs",         "staging_bytes", "seconds"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), figures.begin(), figures.end());
    std::sort(more.begin(), more.end());
    return more;
  };
  CHECK(keys(plan["pairs"][0]) == with({"prefill", "decode", "buffers"}));
  CHECK(keys(plan["sources"][0]) == with({"rank", "destinations"}));
  CHECK(keys(plan["total"]) == with({"sources", "idle_sources", "balance", "predicted_seconds"}));
  CHECK(keys(plan["request"]) == std::vector<std::string>{"pages", "prefix", "room", "tokens"});
  CHECK(keys(plan["prefill"]) ==
        std::vector<std::string>{"dp_rank", "first_token", "page_size", "pages", "topology", "virtual_page"});
  CHECK(keys(plan["cost"]) == std::vector<std::string>{"block_bytes", "block_spans", "fabric", "gbps",
                                                       "staging_bytes", "write_us"});
  CHECK(plan["runs"].size() == 8);
  CHECK(plan["runs"][0]["runs"].size() == 2);
  CHECK(plan["runs"][0]["total"] == 79);
  CHECK(keys(plan["explain"]) == std::vector<std::string>{"decode", "decode_owners", "elections", "moves",
                                                          "prefill", "prefill_owners", "token"});
  CHECK(plan["explain"]["decode_owners"] == json{1});
  CHECK(plan["explain"]["prefill_owners"].size() == 16);
  REQUIRE(plan["explain"]["elections"].size() == 2);
  CHECK(plan["explain"]["elections"][0]["layers"] == json{0, 31});
  const json& holder = plan["explain"]["decode"][0];
  CHECK(holder["row"] == 19);  // token 77 is the 20th of rank 1, in the first page of its list
  CHECK(holder["parts"] ==
        json::array({{{"kind", "latent"}, {"offset", 0}, {"bytes", 1152}, {"row_bytes", 1152}}}));
  PlanOptions bare;
  const json short_plan = document(bare);
  CHECK_FALSE(short_plan.contains("runs"));
  CHECK_FALSE(short_plan.contains("explain"));
}

TEST_CASE("the table fits 110 columns and says what the limit left out") {
  PlanOptions options;
  options.model = "llama-3.1-70b";
  options.prefill = "tp=4,pp=2,dp=2";
  options.decode = "tp=8,dp=4";
  options.prefill_dp = 1;
  options.decode_dp = 3;
  options.tokens = 1'000'000;
  options.page_size = 16;
  options.pages = true;
  options.explain = 999'999;
  options.limit = 3;
  const std::string text = text_of(options);
  CHECK(widest_line(text) <= 110);
  CHECK_THAT(text, Contains("13 more pairs not shown; --limit 0 shows all"));
  CHECK_THAT(text, Contains("62497 more runs not shown"));
  CHECK_THAT(text, Contains("13 more lines not shown"));
  CHECK_THAT(text, Contains("13 more elections not shown"));
  CHECK_THAT(text, Contains("8 ranks of DP rank 3"));
  options.prefill = "tp=32,pp=8,dcp=2,cp=4";
  options.decode = "tp=128,dcp=128";
  options.model = "deepseek-v3";
  options.prefill_dp = options.decode_dp = 0;
  options.tokens = 10'000;
  options.explain = 9999;
  CHECK(widest_line(text_of(options)) <= 110);
}

TEST_CASE("only the ranks of the named DP ranks take part") {
  PlanOptions options;
  options.model = "llama-3.1-70b";
  options.prefill = "tp=4,pp=2,dp=2";
  options.decode = "tp=8,dp=4";
  options.prefill_dp = 1;
  options.decode_dp = 3;
  const json plan = document(options);
  CHECK(plan["pairs"].size() == 16);
  CHECK(plan["pairs"][0]["prefill"] == 8);
  CHECK(plan["pairs"][0]["decode"] == 24);
}

TEST_CASE("a token in the prefix is explained as held already") {
  PlanOptions options = one_to_eight();
  options.prefix = 1024;
  options.explain = 9;
  const json plan = document(options);
  CHECK(plan["explain"]["moves"] == false);
  CHECK(plan["explain"]["decode_owners"] == json{1});
  CHECK_THAT(text_of(options), Contains("token 9     lies in the prefix"));
}

TEST_CASE("a model may be the path of its config.json") {
  const auto folder = std::filesystem::temp_directory_path() / "kvferry-plan-command-test";
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "config.json")
      << R"({"model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32,
             "num_key_value_heads": 8, "hidden_size": 4096, "torch_dtype": "bfloat16"})";
  PlanOptions options;
  options.model = (folder / "config.json").string();
  options.tokens = 1000;
  const json by_path = document(options);
  options.model = "llama-3.1-8b";
  CHECK(by_path["plan_hash"] == document(options)["plan_hash"]);
  options.dtype = "fp8_e4m3";
  CHECK(document(options)["total"]["bytes"].get<std::uint64_t>() * 2 ==
        by_path["total"]["bytes"].get<std::uint64_t>());
  std::filesystem::remove_all(folder);
}
