// Control messages field by field: each missing, of every wrong type, and one beyond each of its limits. The
// error names message, field and what it must be; the limits themselves are legal.

#include <algorithm>
#include <catch2/catch.hpp>
#include <set>

#include "common/control/messages.h"
#include "tests/unit/base/control_samples.h"

using namespace kvferry;
using namespace kvferry::test;
using nlohmann::json;

namespace {

struct Rule {
  std::string field;
  std::string expected;
  std::vector<json> wrong;  // beside its absence
  std::vector<json> right;  // travels unchanged to the other end and back
};

// One value of every MessagePack type but the one for which `is_right` holds.
template <class IsRight>
std::vector<json> of_other_types(IsRight is_right) {
  std::vector<json> out;
  for (const json& value : {json(nullptr), json(true), json(1u), json(-1), json(1.0), json("1"),
                            json::binary({1, 0, 0, 0}), json::array({1u}), json::object({{"1", 1u}})}) {
    if (!is_right(value)) {
      out.push_back(value);
    }
  }
  return out;
}

Rule whole(std::string field, std::uint64_t least, std::uint64_t most) {
  Rule rule{std::move(field),
            fmt::format("a whole number up to {}", most),
            of_other_types([](const json& value) { return value.is_number_unsigned(); }),
            {least, most}};
  if (most < UINT64_MAX) {
    rule.wrong.emplace_back(most + 1);
    rule.wrong.emplace_back(UINT64_MAX);
  }
  return rule;
}

Rule rank(std::string field) {
  return whole(std::move(field), 0, 65535);
}

Rule text(std::string field) {
  Rule rule{std::move(field),
            "a text of at most 4096 bytes",
            of_other_types([](const json& value) { return value.is_string(); }),
            {"", "x", std::string(4096, 'x')}};
  rule.wrong.emplace_back(std::string(4097, 'x'));
  return rule;
}

Rule words(std::string field, std::size_t most) {
  const auto packed = [](std::size_t bytes) { return json::binary(std::vector<std::uint8_t>(bytes, 1)); };
  Rule rule{std::move(field),
            fmt::format("packed words, at most {}", most),
            of_other_types([](const json& value) { return value.is_binary(); }),
            {packed(0), packed(4), packed(4 * most)}};
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{3}, std::size_t{5}, 4 * most + 4}) {
    rule.wrong.push_back(packed(bytes));
  }
  return rule;
}

Rule list(std::string field, std::size_t most, const json& item) {
  Rule rule{std::move(field),
            fmt::format("a list of at most {} items", most),
            of_other_types([](const json& value) { return value.is_array(); }),
            {json::array(), json(most, item)}};
  rule.wrong.push_back(json(most + 1, item));
  return rule;
}

// Items of `field` that are not `good` in one place each: left out, too many, of another type, or too large.
Rule items(std::string field, std::string expected, const json& good,
           const std::vector<std::uint64_t>& most) {
  Rule rule{std::move(field), std::move(expected), {}, {}};
  const auto bad = [&](const json& item) { rule.wrong.push_back(json::array({good, item})); };
  for (const json& item : of_other_types([](const json& value) { return value.is_array(); })) {
    bad(item);
  }
  json longer = good;
  longer.push_back(1u);
  bad(longer);
  for (std::size_t i = 0; i < good.size(); ++i) {
    json shorter = good;
    shorter.erase(i);
    bad(shorter);
    for (json value : of_other_types([&](const json& value) { return value.type() == good[i].type(); })) {
      json item = good;
      item[i] = std::move(value);
      bad(item);
    }
    if (good[i].is_number_unsigned()) {
      json item = good;
      item[i] = most[i];
      rule.right.push_back(json::array({item, good}));
      item[i] = most[i] + 1;
      bad(item);
    }
  }
  return rule;
}

std::vector<Rule> with_key(std::vector<Rule> rules) {
  rules.push_back(whole("room", 1, kRoomMax));
  rules.push_back(whole("generation", 0, UINT64_MAX));
  rules.push_back(rank("decode_rank"));
  return rules;
}

Rule flag(std::string field) {
  return {std::move(field),
          "true or false",
          of_other_types([](const json& value) { return value.is_boolean(); }),
          {true, false}};
}

Rule code() {
  Rule rule = whole("code", 1, 255);
  rule.right = {1u, 31u};  // the others between are unknown and become 31
  return rule;
}

// In the order of the variant. Tokens and prefix limit each other: the sample has 64 of 1000.
std::vector<std::vector<Rule>> rules_by_kind() {
  const json buffer = json::array({60u, 2u, 1152u, 7u, 64u, 66u});
  const json field = json::array({"bootstrap_room", 16u, 128u});
  return {
      {rank("rank"), whole("page_size", 0, 65536), list("buffers", 4096, buffer), list("aux", 64, field),
       items("buffers", "a list of [layer, kind, row_bytes, pages, page_rows, pitch]", buffer,
             {UINT32_MAX, 6, UINT32_MAX, std::uint64_t{1} << 40, UINT32_MAX, UINT32_MAX}),
       items("aux", "a list of [name, width, slots]", field, {0, 1u << 24, 1u << 24})},
      {rank("rank")},
      with_key({words("targets", 65536), whole("prefill_dp", 0, UINT32_MAX),
                words("pages", std::size_t{1} << 22), whole("prefix", 0, kRoomMax),
                whole("tokens", 64, std::uint64_t{1} << 40), flag("has_aux"),
                whole("aux_slot", 0, UINT32_MAX), words("window_pages", std::size_t{1} << 22),
                whole("window_first", 0, std::uint64_t{1} << 40), flag("has_state"),
                whole("state_slot", 0, UINT32_MAX), whole("verify", 0, UINT32_MAX)}),
      with_key({words("targets", 65536), code(), text("reason")}),
      with_key({}),
      {text("kind"), text("carries")},
      with_key({rank("prefill_rank"), code(), text("reason")}),
      with_key({rank("prefill_rank")}),
      with_key({rank("prefill_rank"), whole("tokens_end", 0, std::uint64_t{1} << 40)}),
      {whole("sequence", 0, UINT64_MAX)},
  };
}

std::string error_of(const json& document) {
  const auto message = decode_control(pack(document));
  if (message) {
    return "accepted";
  }
  CHECK(message.error().code == Code::kProtocol);
  return message.error().message;
}

void check_rule(const json& sample, const Rule& rule) {
  const std::string error = fmt::format("control message '{}': field '{}' must be {}",
                                        sample.at("op").get<std::string>(), rule.field, rule.expected);
  for (const json& value : rule.wrong) {
    json document = sample;
    document[rule.field] = value;
    const std::string found = error_of(document);
    if (found != error) {
      FAIL_CHECK("with " << value.dump().substr(0, 100) << "\nfound    " << found << "\nexpected " << error);
    }
  }
  for (const json& value : rule.right) {
    json document = sample;
    document[rule.field] = value;
    if (rule.field == "prefix") {
      document["tokens"] = std::uint64_t{1} << 40;
      document["prefix"] = std::min(value.get<std::uint64_t>(), std::uint64_t{1} << 40);
    }
    const auto message = decode_control(pack(document));
    if (!message || unpack(encode(*message)) != document) {
      FAIL_CHECK("with " << value.dump().substr(0, 100) << ": "
                         << (message ? std::string("is not what came") : message.error().message));
    }
  }
}

}  // namespace

TEST_CASE("control fields: every field of every kind has its rules here") {
  const std::vector<ControlMessage> samples = one_of_each();
  const auto rules = rules_by_kind();
  REQUIRE(rules.size() == samples.size());
  for (std::size_t kind = 0; kind < samples.size(); ++kind) {
    std::set<std::string> ruled = {"op"};
    for (const Rule& rule : rules[kind]) {
      ruled.insert(rule.field);
    }
    std::set<std::string> sent;
    const json document = unpack(encode(samples[kind]));
    for (const auto& [key, value] : document.items()) {
      sent.insert(key);
    }
    if (std::holds_alternative<message::TransferDigest>(samples[kind])) {
      ruled.insert({"layers", "columns", "sums"});  // they limit each other: a test of their own
    }
    CHECK(ruled == sent);
  }
}

TEST_CASE("control fields: a missing field is named with what it must be") {
  const std::vector<ControlMessage> samples = one_of_each();
  const auto rules = rules_by_kind();
  for (std::size_t kind = 0; kind < samples.size(); ++kind) {
    std::set<std::string> seen;
    for (const Rule& rule : rules[kind]) {
      if (!seen.insert(rule.field).second) {
        continue;  // the rule of the items; the first is that of the field
      }
      json document = unpack(encode(samples[kind]));
      const std::string op = document["op"];
      document.erase(rule.field);
      CHECK(error_of(document) ==
            fmt::format("control message '{}': field '{}' must be {}", op, rule.field, rule.expected));
    }
  }
}

TEST_CASE("control fields: wrong types and values beyond the limits are named, the limits are legal") {
  const std::vector<ControlMessage> samples = one_of_each();
  const auto rules = rules_by_kind();
  for (std::size_t kind = 0; kind < samples.size(); ++kind) {
    const json sample = unpack(encode(samples[kind]));
    for (const Rule& rule : rules[kind]) {
      CAPTURE(sample["op"], rule.field);
      REQUIRE_FALSE(rule.wrong.empty());
      check_rule(sample, rule);
    }
  }
}

TEST_CASE("control fields: room 0 is no room") {
  for (const std::size_t kind : {2u, 3u, 4u, 6u, 7u, 8u}) {
    json document = unpack(encode(one_of_each()[kind]));
    document["room"] = 0u;
    CHECK(error_of(document) == fmt::format("control message '{}': field 'room' must be from 1 to 2^63-1",
                                            document["op"].get<std::string>()));
  }
}

TEST_CASE("control fields: a grant's prefix is at most its tokens") {
  json document = unpack(encode(one_of_each()[2]));
  document["prefix"] = 1000u;
  CHECK(error_of(document) == "accepted");
  document["prefix"] = 1001u;
  CHECK(error_of(document) == "control message 'grant': field 'prefix' must be at most tokens=1000, is 1001");
  document["tokens"] = 0u;
  document["prefix"] = 0u;
  CHECK(error_of(document) == "accepted");
}

TEST_CASE("control fields: a digest has one sum for each layer and column, its layers ascend") {
  const json sample = unpack(encode(one_of_each()[8]));
  const auto with = [&](const char* field, json value) {
    json document = sample;
    document[field] = std::move(value);
    return error_of(document);
  };
  const auto packed = [](std::size_t bytes) { return json::binary(std::vector<std::uint8_t>(bytes, 1)); };
  const std::string start = "control message 'digest': field ";
  CHECK(with("columns", 1u) == start + "'sums' must be 2 sums of 8 bytes, one for each layer and column");
  CHECK(with("columns", 2049u) == start + "'columns' must be a whole number up to 2048");
  CHECK(with("sums", packed(24)) ==
        start + "'sums' must be 4 sums of 8 bytes, one for each layer and column");
  CHECK(with("sums", packed(7)) == start + "'sums' must be packed words, at most 16777216");
  CHECK(with("layers", packed(8)) == start + "'layers' must be ascending");
  CHECK(with("layers", "x") == start + "'layers' must be packed words, at most 4096");
}

TEST_CASE("control fields: names of aux fields are clean and of at most 128 bytes") {
  json document = unpack(encode(one_of_each()[0]));
  const auto named = [&](const std::string& name) {
    document["aux"][0][0] = name;
    return error_of(document);
  };
  CHECK(named(std::string(128, 'n')) == "accepted");
  const std::string error = "control message 'rank_up': field 'aux' must be a list of [name, width, slots]";
  CHECK(named(std::string(129, 'n')) == error);
  CHECK(named("a\nb") == error);
  CHECK(named("\xFF") == error);
}

TEST_CASE("control fields: the first wrong field is the one that is named") {
  json document = unpack(encode(one_of_each()[2]));
  document["tokens"] = "many";
  document["generation"] = -1;
  CHECK(error_of(document) == "control message 'grant': field 'generation' must be a whole number up to " +
                                  std::to_string(UINT64_MAX));
}
