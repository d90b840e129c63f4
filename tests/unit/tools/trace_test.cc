#include "tools/cli/demo/trace.h"

#include <algorithm>
#include <random>
#include <set>

#include <catch2/catch.hpp>

namespace kvferry {
namespace {

std::string error_of(std::string_view text) {
  const auto trace = parse_trace(text, "t.jsonl");
  return trace ? "" : trace.error().message;
}

std::string row(std::string_view fields) {
  return fmt::format("{{\"timestamp\": 0, \"output_length\": 1, {}}}\n", fields);
}

}  // namespace

TEST_CASE("a trace row gives its times, lengths and block ids") {
  const auto trace = parse_trace(
      "{\"timestamp\": 7, \"input_length\": 1100, \"output_length\": 52, \"hash_ids\": [0, 5, 9]}\n\n"
      "{\"hash_ids\": [], \"output_length\": 0, \"input_length\": 1, \"timestamp\": 8, \"extra\": null}",
      "t.jsonl");
  REQUIRE(trace);
  REQUIRE(trace->size() == 2);
  CHECK(trace->front() == TraceRequest{7, 1100, 52, {0, 5, 9}});
  CHECK(trace->back() == TraceRequest{8, 1, 0, {}});
}

TEST_CASE("a wrong trace names the line and the field") {
  const std::string good = row(R"("input_length": 5, "hash_ids": [1])");
  CHECK(error_of(good + "{").find("t.jsonl:2: not JSON") == 0);
  CHECK(error_of("[1]").find("t.jsonl:1: a JSON array") == 0);
  CHECK(error_of(good + "\n" + row(R"("hash_ids": [1])")).find("t.jsonl:3: field input_length: missing") ==
        0);
  CHECK(error_of(row(R"("input_length": 0, "hash_ids": [])")).find("field input_length: 0 is not from 1") !=
        std::string::npos);
  CHECK(error_of(row(R"("input_length": 99999999999, "hash_ids": [])")).find("field input_length") !=
        std::string::npos);
  CHECK(error_of(row(R"("input_length": -5, "hash_ids": [])")).find("field input_length: -5") !=
        std::string::npos);
  CHECK(error_of(row(R"("input_length": 5.5, "hash_ids": [])")).find("field input_length: 5.5") !=
        std::string::npos);
  CHECK(error_of(row(R"("input_length": 1e99, "hash_ids": [])")).find("field input_length") !=
        std::string::npos);
  CHECK(error_of(row(R"("input_length": "5", "hash_ids": [])")).find("field input_length") !=
        std::string::npos);
  CHECK(error_of(row(R"("input_length": 5)")).find("field hash_ids: missing") != std::string::npos);
  CHECK(error_of(row(R"("input_length": 5, "hash_ids": [-1])")).find("hash_ids: entry 0") !=
        std::string::npos);
  CHECK(error_of(row(R"("input_length": 512, "hash_ids": [1, 2])")).find("hash_ids: 2 ids") !=
        std::string::npos);
  CHECK(error_of("\n \n").find("no request") != std::string::npos);
}

TEST_CASE("at most the asked number of rows is read, and nothing behind them matters") {
  const std::string good = row(R"("input_length": 5, "hash_ids": [1])");
  const auto trace = parse_trace(good + good + "garbage", "t", 2);
  REQUIRE(trace);
  CHECK(trace->size() == 2);
}

TEST_CASE("a generated trace is repeatable, well formed and has prefix hits and long requests") {
  const std::uint64_t seed = std::random_device{}();
  INFO("seed " << seed);
  const auto trace = generate_trace(400, seed);
  REQUIRE(trace.size() == 400);
  CHECK(generate_trace(400, seed) == trace);
  CHECK(generate_trace(400, seed + 1) != trace);
  const auto parsed = parse_trace(print_trace(trace), "generated");
  REQUIRE(parsed);
  CHECK(*parsed == trace);
  PrefixCache cache;
  std::uint64_t hits = 0;
  std::uint64_t longest = 0;
  for (const TraceRequest& request : trace) {
    CHECK(request.hash_ids.size() == (request.input_tokens + 511) / 512);
    hits += cache.hit_tokens(request) > 0 ? 1 : 0;
    longest = std::max(longest, request.input_tokens);
    cache.add(request, request.input_tokens);
  }
  CHECK(hits > 100);
  CHECK(longest > 8192);
}

TEST_CASE("a prefix hit counts the leading blocks that were seen, and only those") {
  PrefixCache cache;
  const TraceRequest first{0, 1300, 1, {1, 2, 3}};
  CHECK(cache.hit_tokens(first) == 0);
  cache.add(first, 1024);
  CHECK(cache.hit_tokens(first) == 1024);
  CHECK(cache.hit_tokens({0, 1300, 1, {2, 1, 3}}) == 1024);
  CHECK(cache.hit_tokens({0, 1300, 1, {9, 1, 2}}) == 0);
  cache.add(first, 1300);
  CHECK(cache.hit_tokens(first) == 1300);
  CHECK(cache.hit_tokens({0, 4000, 1, {1, 2, 3}}) == 1536);
}

}  // namespace kvferry
