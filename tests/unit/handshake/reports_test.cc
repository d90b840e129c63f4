// Faults that other products have been seen to have (shared case list, BL-...), as far as the handshake is
// concerned, each with its kind and not with its numbers alone.
#include <algorithm>
#include <catch2/catch.hpp>

#include "common/handshake/rules.h"
#include "common/handshake/shapes.h"
#include "common/plan/plan.h"
#include "common/topology/rank_map.h"
#include "samples.h"

using namespace kvferry;
using Catch::Contains;
using samples::layout;

namespace {

/// Every part that a request can have: tokens of heads or of a latent, windows, state, draft layers, index
/// rows; with state whose blocks some TP sizes do not divide.
std::vector<ModelGeometry> models() {
  std::vector<ModelGeometry> out{samples::mha_model(), samples::mla_model()};
  ModelGeometry& windows = out.emplace_back(samples::mha_model());
  windows.kv_layers = {1, 3};
  windows.sliding_layers = {0, 2};
  windows.sliding_window = 128;
  ModelGeometry& linear = out.emplace_back(samples::mha_model());
  linear.kv_layers = {3};
  linear.state_layers = {0, 1, 2};
  linear.state = {{BufferKind::kConv, 3, {8, 8, 16}, 2}, {BufferKind::kRecurrent, 1, {12}, 256}};
  ModelGeometry& index = out.emplace_back(samples::mla_model());
  index.index_head_dim = 128;
  index.draft_layers = 1;
  return out;
}

/// Whether every rank of the one side can be paired with every rank of the other.
bool can_be_planned(const samples::Pair& pair) {
  return std::all_of(pair.prefill.ranks.begin(), pair.prefill.ranks.end(), [&](const RankDescription& from) {
    return std::all_of(pair.decode.ranks.begin(), pair.decode.ranks.end(), [&](const RankDescription& into) {
      return pair_layouts(pair.prefill.geometry, rank_shape(pair.prefill, from),
                          rank_shape(pair.decode, into))
          .has_value();
    });
  });
}

}  // namespace

TEST_CASE("BL-12: a component that cannot be divided is refused by name, with both TP sizes") {
  ModelGeometry model = models()[3];
  for (const BufferKind kind : {BufferKind::kConv, BufferKind::kRecurrent}) {
    model.state = {{kind, 1, {6}, 64}};
    samples::Pair pair = samples::pair(model, layout("tp=1"), layout("tp=1"));
    REQUIRE_FALSE(refuses(evaluate(pair.prefill, pair.decode)));
    // Its pool could not even be made, so the ranks are those of the other layout.
    pair.decode.topology = layout("tp=4");
    const auto violations = evaluate(pair.prefill, pair.decode);
    const Violation& violation = samples::find(violations, "topology");
    CHECK(violation.severity == Severity::kError);
    CHECK_THAT(violation.message,
               Contains("decode") && Contains("tp 4 does not divide a " + std::string(to_string(kind)) +
                                              " state block of 6 elements"));
    CHECK(violation.prefill == "tp=1");
    CHECK(violation.decode == "tp=4");
    // The daemon of that side says so itself, before there is any peer.
    CHECK_THAT(validate(pair.decode.topology, model).error().message,
               Contains(std::string(to_string(kind)) + " state block"));
  }
}

// The report's component was refused by the worker that was to send it. Here nothing is left to find then:
// what the rules accept can be planned, between any two ranks and for all components.
TEST_CASE("BL-12: what the rules accept can be planned for every component, whatever the TP sizes") {
  std::uint32_t accepted = 0;
  std::uint32_t refused = 0;
  for (const ModelGeometry& model : models()) {
    for (const char* prefill : {"tp=1", "tp=2", "tp=3", "tp=4", "tp=8", "tp=16", "tp=2,pp=3", "tp=4,cp=2"}) {
      for (const char* decode :
           {"tp=1", "tp=2", "tp=3", "tp=4", "tp=6", "tp=8,dcp=4", "tp=12", "tp=2,pp=4"}) {
        const bool legal = validate_pair(model, layout(prefill), layout(decode)).has_value();
        samples::Pair pair = samples::pair(model, layout("tp=1"), layout("tp=1"));
        pair.prefill.topology = layout(prefill);
        pair.decode.topology = layout(decode);
        if (legal) {
          samples::attach_all(pair.prefill);
          samples::attach_all(pair.decode);
        }
        INFO(model.name << ": " << prefill << " -> " << decode);
        CHECK(refuses(evaluate(pair.prefill, pair.decode)) == !legal);
        CHECK((!legal || can_be_planned(pair)));
        ++(legal ? accepted : refused);
      }
    }
  }
  CHECK(accepted > 100);
  CHECK(refused > 50);
}
