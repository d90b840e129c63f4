#include <algorithm>
#include <catch2/catch.hpp>
#include <functional>
#include <iostream>
#include <nlohmann/json.hpp>
#include <set>

#include "common/handshake/rules.h"
#include "common/topology/rank_map.h"
#include "samples.h"

using namespace kvferry;
using Catch::Contains;
using samples::layout;

namespace {

using Rules = std::vector<std::string>;

Rules judged(const samples::Pair& pair) {
  return samples::rules_of(evaluate(pair.prefill, pair.decode));
}

samples::Pair mha(std::string_view prefill, std::string_view decode) {
  return samples::pair(samples::mha_model(), layout(prefill), layout(decode));
}

samples::Pair mla(std::string_view prefill, std::string_view decode) {
  return samples::pair(samples::mla_model(), layout(prefill), layout(decode));
}

/// One rule: what makes exactly it fire, and what its message must say.
struct Case {
  const char* rule;
  std::function<samples::Pair()> broken;
  std::vector<const char*> says;
};

samples::Pair with(samples::Pair pair, const std::function<void(samples::Pair&)>& change) {
  change(pair);
  return pair;
}

/// The decode side made anew for a changed model, so that its pool follows.
samples::Pair other_model(const std::function<void(ModelGeometry&)>& change, samples::Pair pair) {
  change(pair.decode.geometry);
  samples::attach_all(pair.decode);
  return pair;
}

std::vector<Case> peer_cases() {
  const auto base = [] { return mha("tp=2", "tp=2"); };
  return {
      {"role",
       [=] { return with(base(), [](auto& p) { p.decode.role = Role::kPrefill; }); },
       {"prefill side says prefill and the decode side says prefill"}},
      {"protocol",
       [=] {
         return with(base(), [](auto& p) {
           p.decode.protocol_min = 2;
           p.decode.protocol_max = 3;
         });
       },
       {"prefill speaks 1 to 1, decode speaks 2 to 3"}},
      {"model",
       [=] { return with(base(), [](auto& p) { p.decode.model.name = "another"; }); },
       {"prefill serves mha-test, decode serves another"}},
      {"model",
       [=] {
         return with(base(), [](auto& p) {
           p.prefill.model.hash = "aa";
           p.decode.model.hash = "bb";
         });
       },
       {"hash aa", "hash bb"}},
      {"model_revision",
       [=] { return with(base(), [](auto& p) { p.decode.model.revision = "r2"; }); },
       {"prefill r1, decode r2"}},
      {"fabrics",
       [=] { return with(base(), [](auto& p) {
               p.decode.fabrics = {{"verbs", "{}"}};
             }); },
       {"prefill offers ucx,tcp", "decode offers verbs"}},
      {"ranks",
       [=] { return with(base(), [](auto& p) { p.decode.ranks.clear(); }); },
       {"the decode side has no rank attached"}},
      {"ranks",
       [=] { return with(base(), [](auto& p) { p.prefill.ranks[1].index = 2; }); },
       {"the prefill side has rank 2, but tp*pp*cp*dp gives ranks 0 to 1"}},
      {"ranks",
       [=] { return with(base(), [](auto& p) { p.prefill.ranks[1].coord.tp = 0; }); },
       {"says rank 1 is tp 0", "makes it tp 1"}},
      {"ranks",
       [=] { return with(base(), [](auto& p) { p.prefill.ranks[1] = p.prefill.ranks[0]; }); },
       {"lists rank 0 twice"}},
  };
}

std::vector<Case> geometry_cases() {
  const auto base = [] { return mha("tp=2", "tp=2"); };
  return {
      {"page_size",
       [=] {
         return with(base(), [](auto& p) {
           p.decode.page_size = 32;
           samples::attach_all(p.decode);
         });
       },
       {"Page size mismatch: prefill 64, decode 32; pages are regrouped"}},
      {"dtype",
       [=] { return other_model([](auto& m) { m.dtype = Dtype::kFp16; }, base()); },
       {"KV cache dtype mismatch: prefill bf16, decode fp16"}},
      {"layers",
       [=] {
         return other_model(
             [](auto& m) {
               m.hidden_layers = 5;
               m.kv_layers = {0, 1, 2, 3};
             },
             base());
       },
       {"layer counts differ: prefill 4, decode 5"}},
      {"v_head_dim",
       [=] {
         samples::Pair pair = base();
         for (Descriptor* side :
              {&pair.prefill, &pair.decode}) {  // without value buffers nothing else can differ
           for (RankDescription& rank : side->ranks) {
             rank.buffers.clear();
           }
         }
         pair.decode.geometry.v_head_dim = 64;
         return pair;
       },
       {"value head sizes differ: prefill 128, decode 64"}},
      {"rope_dim",
       [=] {
         return other_model(
             [](auto& m) {
               m.latent_dim = 544;
               m.rope_dim = 32;
             },
             mla("tp=2", "tp=2"));
       },
       {"MLA rope sizes differ: prefill 64, decode 32"}},
      {"latent_dim",
       [=] {
         return other_model(
             [](auto& m) {
               m.latent_dim = 544;
               m.rope_dim = 32;
             },
             mla("tp=2", "tp=2"));
       },
       {"MLA latent sizes differ: prefill 512, decode 544"}},
      {"index_head_dim",
       [=] { return other_model([](auto& m) { m.index_head_dim = 128; }, mla("tp=1", "tp=1")); },
       {"sparse index key sizes differ: prefill 0, decode 128"}},
      {"sliding_window",
       [=] { return other_model([](auto& m) { m.sliding_window = 128; }, base()); },
       {"sliding windows differ: prefill 0, decode 128"}},
  };
}

std::vector<Case> topology_cases() {
  return {
      {"cp_split",
       [] { return mha("tp=2", "tp=2,cp=2,cp_split=zigzag"); },
       {"decode splits tokens over 2 CP ranks (zigzag)"}},
      {"dcp_interleave",
       [] { return mla("tp=4", "tp=4,dcp=4,interleave=128"); },
       {"decode page size 64 is not a multiple of its DCP interleave 128"}},
  };
}

std::vector<Case> buffer_cases() {
  const auto base = [] { return mha("tp=2", "tp=2"); };
  return {
      {"entries",
       [=] { return with(base(), [](auto& p) { p.decode.ranks[1].buffers.pop_back(); }); },
       {"decode rank 1 has no entry for layer 3 value"}},
      {"entries",
       [=] {
         return with(base(),
                     [](auto& p) { p.prefill.ranks[0].buffers.push_back(p.prefill.ranks[0].buffers[2]); });
       },
       {"prefill rank 0 lists layer 2 key twice, again at entry 8"}},
      {"entries",
       [=] {
         return with(mla("tp=2", "tp=2"), [](auto& p) {
           p.prefill.ranks[0].buffers.push_back({1, BufferKind::kKey, 576 * 64, 1000});
         });
       },
       {"rank 0 has layer 1 key at entry 4, but mla pools have no key buffers"}},
      {"extra_entries",
       [=] {
         return with(base(), [](auto& p) {
           p.prefill.ranks[0].buffers.push_back({4, BufferKind::kKey, 4 * 256 * 64, 1000});
         });
       },
       {"prefill rank 0 entry 8 (layer 4 key) lies outside the 4 layers of the model"}},
      {"extra_entries",
       [=] {
         return with(base(), [](auto& p) {
           p.decode.ranks[0].buffers.push_back({4, BufferKind::kKey, 4 * 256 * 64, 1000});
         });
       },
       {"decode rank 0 entry 8 (layer 4 key)", "stays unfilled"}},
      {"row_bytes",
       [=] { return with(base(), [](auto& p) { p.prefill.ranks[1].buffers[5].item_len += 1; }); },
       {"rank 1 entry 5 (layer 1 value): item_len 65537 is not a whole number of 64 tokens of 4 heads"}},
      {"aux_schema",
       [=] { return with(base(), [](auto& p) { p.prefill.ranks[1].aux[0].width = 128; }); },
       {"prefill rank 1 against decode rank 0",
        "aux buffer 0 is output_ids of 128 bytes against output_ids of 64"}},
      {"aux_schema",
       [=] { return with(base(), [](auto& p) { p.decode.ranks[1].aux.pop_back(); }); },
       {"decode rank 1", "1 against 2 aux buffers"}},
      {"state_components",
       [=] { return with(base(), [](auto& p) { p.prefill.state_components = {"swa"}; }); },
       {"prefill swa, decode none"}},
      {"layout",
       [=] {
         return with(mha("tp=2,pp=2", "tp=2"), [](auto& p) {
           p.prefill.ranks[0].buffers.push_back({3, BufferKind::kKey, 4 * 256 * 64, 1000});
         });
       },
       {"no transfer can be planned", "layer 3"}},
  };
}

std::vector<Case> all_cases() {
  std::vector<Case> out;
  for (const auto& group : {peer_cases(), geometry_cases(), topology_cases(), buffer_cases()}) {
    out.insert(out.end(), group.begin(), group.end());
  }
  return out;
}

}  // namespace

TEST_CASE("a pair that fits has no violation") {
  CHECK(judged(mha("tp=2", "tp=2")) == Rules{});
  CHECK(judged(mha("tp=1", "tp=16")) == Rules{});
  CHECK(judged(mha("tp=16,pp=2", "tp=4")) == Rules{});
  CHECK(judged(mha("tp=2,pp=2,cp=2,dp=2", "tp=4,pp=2,dp=3")) == Rules{});
  CHECK(judged(mha("tp=2,pp=2,pp_layers=1+3", "tp=2,pp=2,pp_layers=3+1")) == Rules{});
  CHECK(judged(mla("tp=8", "tp=2")) == Rules{});
  CHECK(judged(mla("tp=1", "tp=4,dcp=4")) == Rules{});
  CHECK(judged(mla("tp=4,pp=4", "tp=8,dcp=8,interleave=64")) == Rules{});
  CHECK(judged(mla("tp=8,dcp=8", "tp=8,dcp=8")) == Rules{});
}

TEST_CASE("each rule fires on its own fault and names both values and a fix") {
  for (const Case& one : all_cases()) {
    const samples::Pair pair = one.broken();
    const auto violations = evaluate(pair.prefill, pair.decode);
    CAPTURE(one.rule, samples::rules_of(violations));
    const Violation& violation = samples::find(violations, one.rule);
    for (const char* words : one.says) {
      CHECK_THAT(violation.message, Contains(words));
    }
    CHECK_FALSE(violation.fix.empty());
    CHECK_FALSE(violation.field.empty());
  }
}

TEST_CASE("a fault of one field fires its rule alone") {
  // These faults have no second meaning, so a second rule would be noise.
  const std::set<std::string> also_others = {"rope_dim", "latent_dim", "v_head_dim",    "ranks",
                                             "layers",   "cp_split",   "index_head_dim"};
  for (const Case& one : all_cases()) {
    const samples::Pair pair = one.broken();
    if (!also_others.contains(one.rule)) {
      CAPTURE(one.rule);
      CHECK(judged(pair) == Rules{one.rule});
    }
  }
}

TEST_CASE("geometry faults that change the rows fire their rule beside the rows' own") {
  const auto heads = other_model([](auto& m) { m.kv_heads = 4; }, mha("tp=2", "tp=2"));
  CHECK_THAT(samples::find(evaluate(heads.prefill, heads.decode), "kv_heads").message,
             Contains("KV head counts differ: prefill 8, decode 4"));
  const auto size = other_model([](auto& m) { m.head_dim = 64; }, mha("tp=2", "tp=2"));
  const auto violations = evaluate(size.prefill, size.decode);
  CHECK_THAT(samples::find(violations, "head_dim").message,
             Contains("key head sizes differ: prefill 128, decode 64"));
  CHECK_THAT(
      samples::find(violations, "item_len").message,
      Contains("KV geometry differs at entry 0 (layer 0 key)") && Contains("256 bytes at prefill and 128"));
  samples::Pair kinds = mha("tp=2", "tp=2");
  kinds.decode = samples::daemon(Role::kDecode, samples::mla_model(), layout("tp=2"));
  CHECK_THAT(samples::find(evaluate(kinds.prefill, kinds.decode), "attention_kind").message,
             Contains("attention kinds differ: prefill mha, decode mla"));
}

TEST_CASE("layers are compared by id and not by position") {
  ModelGeometry model = samples::mha_model();
  model.hidden_layers = 8;
  samples::Pair pair = samples::pair(model, layout("tp=2"), layout("tp=2"));
  std::reverse(pair.decode.ranks[0].buffers.begin(), pair.decode.ranks[0].buffers.end());
  CHECK(judged(pair) == Rules{});

  pair.decode.geometry.kv_layers = {0, 1, 2, 5};
  samples::attach_all(pair.decode);
  const auto violations = evaluate(pair.prefill, pair.decode);
  CHECK_THAT(samples::find(violations, "layers").message,
             Contains("prefill 0-3, decode 0-2,5; only at prefill: 3, only at decode: 5"));
}

TEST_CASE("layouts that others refuse fit: DCP of any two sizes, any PP, CP, TP, and MLA or not") {
  CHECK(judged(mla("tp=4,dcp=4", "tp=4")) == Rules{});
  CHECK(judged(mla("tp=4,dcp=2", "tp=4,dcp=4")) == Rules{});
  CHECK(judged(mla("tp=8,dcp=8", "tp=2,dcp=2")) == Rules{});
  CHECK(judged(mla("tp=4,cp=2", "tp=4,dcp=4")) == Rules{});
  CHECK(judged(mla("tp=4,cp=2,cp_split=pages", "tp=4,dcp=4")) == Rules{});
  CHECK(judged(mla("tp=8,dcp=4", "tp=4,dcp=4")) == Rules{});
  CHECK(judged(mla("tp=4,dcp=4,interleave=1", "tp=4,dcp=4,interleave=16")) == Rules{});
  CHECK(judged(mla("tp=3", "tp=2")) == Rules{});
  CHECK(judged(mha("tp=4", "tp=4,dcp=2")) == Rules{});
  CHECK(judged(mha("tp=16", "tp=16,dcp=2")) == Rules{});
  CHECK(judged(mha("tp=2,pp=4", "tp=2,pp=2")) == Rules{});
  CHECK(judged(mha("tp=2", "tp=2,cp=2")) == Rules{});
}

TEST_CASE("three wrong fields list all three") {
  samples::Pair pair = mha("tp=2", "tp=2");
  pair.decode.geometry.dtype = Dtype::kFp16;
  pair.decode.page_size = 32;
  samples::attach_all(pair.decode);
  pair.decode.model.name = "another";
  CHECK(judged(pair) == Rules{"model", "page_size", "dtype"});
}

TEST_CASE("heads that neither divide nor replicate are refused on the side that has them") {
  samples::Pair pair = mha("tp=2", "tp=2");
  pair.decode.topology = layout("tp=6");
  const auto violations = evaluate(pair.prefill, pair.decode);
  const Violation& violation = samples::find(violations, "heads_divide_or_replicate");
  CHECK_THAT(violation.message,
             Contains("8 KV heads neither divide nor replicate over TP 6 on the decode side"));
  CHECK(std::count_if(violations.begin(), violations.end(),
                      [](const Violation& v) { return v.rule == "heads_divide_or_replicate"; }) == 1);
}

TEST_CASE("an illegal topology is refused by side and never mapped") {
  samples::Pair pair = mla("tp=4", "tp=4");
  pair.decode.topology.dcp = 3;
  CHECK_THAT(samples::find(evaluate(pair.prefill, pair.decode), "topology").message,
             Contains("the decode topology is not legal") && Contains("dcp 3"));
  pair = mha("tp=2,pp=2", "tp=2");
  pair.prefill.topology.pp_layers = {1, 1};
  CHECK_THAT(samples::find(evaluate(pair.prefill, pair.decode), "topology").message,
             Contains("the prefill topology is not legal") && Contains("pp_layers"));
}

TEST_CASE("draft entries of other sizes are named by entry and both sizes") {
  // Reported from the field: 24 entries of 576 bytes and 10 of 128 against 34 of 576 left every request
  // hanging.
  ModelGeometry model = samples::mla_model();
  model.hidden_layers = 34;
  model.kv_layers.clear();
  for (std::uint32_t layer = 0; layer < 34; ++layer) {
    model.kv_layers.push_back(layer);
  }
  samples::Pair pair = samples::pair(model, layout("tp=1"), layout("tp=8,dcp=8"));
  for (std::size_t entry = 24; entry < 34; ++entry) {
    pair.prefill.ranks[0].buffers[entry].item_len = 128 * 64;
  }
  const auto violations = evaluate(pair.prefill, pair.decode);
  const Violation& violation = samples::find(violations, "item_len");
  CHECK_THAT(violation.message, Contains("KV geometry differs at entry 24") &&
                                    Contains("128 bytes at prefill") && Contains("576 at decode") &&
                                    Contains("and 9 more entries"));
  CHECK(violation.prefill == "128");
  CHECK(violation.decode == "576");
  CHECK(judged(samples::pair(model, layout("tp=1"), layout("tp=8,dcp=8"))) == Rules{});
}

TEST_CASE("item lengths are compared per head, so unequal TP compares what moves") {
  samples::Pair pair = mha("tp=2", "tp=8");
  CHECK(pair.prefill.ranks[0].buffers[0].item_len == 4 * pair.decode.ranks[0].buffers[0].item_len);
  CHECK(judged(pair) == Rules{});
  for (RankDescription& rank : pair.decode.ranks) {
    rank.buffers[6].item_len *= 2;
  }
  CHECK_THAT(samples::find(evaluate(pair.prefill, pair.decode), "item_len").message,
             Contains("entry 6 (layer 2 value)") && Contains("256 bytes at prefill and 512 at decode"));
}

TEST_CASE("equal hashes settle different model names, and unknown identities are not compared") {
  samples::Pair pair = mha("tp=2", "tp=2");
  pair.decode.model.name = "/srv/models/mha";
  pair.prefill.model.hash = pair.decode.model.hash = "aa";
  CHECK(judged(pair) == Rules{});
  pair.prefill.model = {};
  CHECK(judged(pair) == Rules{});
}

TEST_CASE("warnings alone do not refuse") {
  samples::Pair pair = mha("tp=2", "tp=2");
  pair.decode.model.revision = "r2";
  const auto violations = evaluate(pair.prefill, pair.decode);
  REQUIRE(violations.size() == 1);
  CHECK(violations[0].severity == Severity::kWarning);
  CHECK_FALSE(refuses(violations));
  pair.decode.page_size = 32;
  samples::attach_all(pair.decode);
  CHECK(judged(pair) == Rules{"model_revision", "page_size"});
  CHECK_FALSE(refuses(evaluate(pair.prefill, pair.decode)));
  pair.decode.geometry.dtype = Dtype::kFp16;
  CHECK(refuses(evaluate(pair.prefill, pair.decode)));
}

TEST_CASE("the fabric is the first of the prefill side that works, and shm needs one host") {
  samples::Pair pair = mha("tp=2", "tp=2");
  pair.prefill.fabrics = {{"shm", "{}"}, {"ucx", "{}"}, {"tcp", "{}"}};
  pair.decode.fabrics = {{"tcp", "{}"}, {"shm", "{}"}};
  CHECK(choose_fabric(pair.prefill, pair.decode) == "tcp");
  pair.decode.host_id = pair.prefill.host_id;
  CHECK(choose_fabric(pair.prefill, pair.decode) == "shm");
  pair.prefill.host_id = pair.decode.host_id = "";
  CHECK(choose_fabric(pair.prefill, pair.decode) == "tcp");
  pair.decode.fabrics = {};
  CHECK_FALSE(choose_fabric(pair.prefill, pair.decode).has_value());
}

TEST_CASE("the protocol is the highest that both speak") {
  samples::Pair pair = mha("tp=2", "tp=2");
  pair.prefill.protocol_max = 4;
  pair.decode.protocol_min = 2;
  pair.decode.protocol_max = 3;
  CHECK(agreed_protocol(pair.prefill, pair.decode) == 3U);
  pair.decode.protocol_min = pair.decode.protocol_max = 5;
  CHECK_FALSE(agreed_protocol(pair.prefill, pair.decode).has_value());
}

TEST_CASE("the rule ids are unique, and every rule that a test fires is one of them") {
  const auto& ids = rule_ids();
  const std::set<std::string_view> unique(ids.begin(), ids.end());
  CHECK(unique.size() == ids.size());
  for (const Case& one : all_cases()) {
    CHECK(unique.contains(one.rule));
  }
  for (const char* id : {"attention_kind", "kv_heads", "head_dim", "item_len", "topology", "dcp_interleave",
                         "heads_divide_or_replicate"}) {
    CHECK(unique.contains(id));
  }
}

TEST_CASE("no two random descriptors can make a rule crash") {
  const std::uint64_t seed = samples::seed();
  std::cout << "seed " << std::hex << seed << std::dec << "\n";
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  for (int i = 0; i < 1000; ++i) {
    const Descriptor a = samples::random_descriptor(random);
    const Descriptor b = samples::random_descriptor(random);
    REQUIRE(refuses(evaluate(a, b)));
    for (const Violation& violation : evaluate(a, a)) {
      REQUIRE_FALSE(violation.message.empty());
    }
  }
}

TEST_CASE("what the rules accept can be mapped, for random small topologies") {
  const std::uint64_t seed = samples::seed();
  std::cout << "seed " << std::hex << seed << std::dec << "\n";
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  const auto any = [&random](std::initializer_list<std::uint32_t> values) {
    return values.begin()[std::uniform_int_distribution<std::size_t>(0, values.size() - 1)(random)];
  };
  const auto any_topology = [&any] {
    return Topology{any({1, 2, 3, 4, 8, 16}),
                    any({1, 1, 2, 3}),
                    any({1, 1, 1, 2}),
                    CpSplit::kNone,
                    any({1, 2}),
                    any({1, 1, 2, 4}),
                    any({1, 16, 48}),
                    {}};
  };
  int accepted = 0;
  for (int i = 0; i < 2000; ++i) {
    const ModelGeometry model = any({0, 1}) == 0 ? samples::mha_model() : samples::mla_model();
    const Topology prefill = any_topology();
    const Topology decode = any_topology();
    if (!validate(prefill, model) || !validate(decode, model)) {
      continue;
    }
    const samples::Pair pair = samples::pair(model, prefill, decode);
    if (refuses(evaluate(pair.prefill, pair.decode))) {
      continue;
    }
    ++accepted;
    REQUIRE(validate_pair(model, prefill, decode).has_value());
    for (const RankDescription& rank : pair.decode.ranks) {
      REQUIRE_FALSE(decode_targets(model, prefill, decode, rank.index, 0, 77).sources.empty());
    }
  }
  CHECK(accepted > 100);
}
