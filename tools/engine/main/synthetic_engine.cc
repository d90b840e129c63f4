// kvferry-synthetic-engine: the ranks of one side with pools in host memory, driven by JSON lines (see
// tools/engine/protocol.h). It uses the daemon only through kvferry.h, as any engine does.

#include <charconv>
#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdio>
#include <map>

#include "tools/engine/engine_loop.h"

namespace kvferry {
namespace {

struct Arguments {
  EngineSide side = EngineSide::kPrefill;
  std::string socket;
  std::string model;
  std::string dtype;
  std::string topology = "tp=1";
  std::string ranks;
  std::uint32_t draft_layers = 0;
  RankOptions rank;
};

// "0-3" or "0,2,5-7"; empty: all.
Result<std::vector<RankIndex>> parse_ranks(const std::string& text, std::uint32_t count) {
  std::vector<RankIndex> ranks;
  std::string_view rest = text;
  const auto number = [&](RankIndex& out) {
    const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), out);
    const bool good = error == std::errc{} && out < count;
    rest.remove_prefix(static_cast<std::size_t>(end - rest.data()));
    return good;
  };
  while (!rest.empty()) {
    RankIndex first = 0;
    bool good = number(first);
    RankIndex last = first;
    if (good && rest.starts_with('-')) {
      rest.remove_prefix(1);
      good = number(last);
    }
    if (!good || last < first || (!rest.empty() && rest.front() != ',')) {
      return fail(Code::kInvalid, "--ranks '{}': needs ranks and ranges below {}, e.g. 0-1 or 0,2", text,
                  count);
    }
    for (RankIndex rank = first; rank <= last; ++rank) {
      ranks.push_back(rank);
    }
    rest.remove_prefix(rest.empty() ? 0 : 1);
  }
  for (RankIndex rank = 0; text.empty() && rank < count; ++rank) {
    ranks.push_back(rank);
  }
  return ranks;
}

Result<void> run(Arguments arguments) {
  RankOptions& rank = arguments.rank;
  rank.socket = arguments.socket;
  KVF_TRY(rank.model, load_geometry(arguments.model));
  if (!arguments.dtype.empty()) {
    KVF_TRY(rank.model.dtype, parse_dtype(arguments.dtype));
  }
  rank.model.draft_layers = arguments.draft_layers;
  KVF_TRY(rank.topology, parse_topology(arguments.topology));
  KVF_TRY_VOID(validate(rank.topology, rank.model));
  EngineLoop::Options options;
  options.side = arguments.side;
  options.rank = rank;
  KVF_TRY(options.ranks, parse_ranks(arguments.ranks, rank.topology.rank_count()));
  KVF_TRY(const auto loop, EngineLoop::create(options));
  return loop->run();
}

}  // namespace
}  // namespace kvferry

int main(int argc, char** argv) {
  using kvferry::EngineSide;
  kvferry::Arguments arguments;
  CLI::App app{
      "Synthetic engine: fills and checks KV pages with values derived from (room, layer, head, position)"};
  app.add_option("--role", arguments.side, "prefill or decode")
      ->required()
      ->transform(CLI::CheckedTransformer(std::map<std::string, EngineSide>{
          {"prefill", EngineSide::kPrefill}, {"decode", EngineSide::kDecode}}));
  app.add_option("--socket", arguments.socket, "the daemon's engine socket")->required();
  app.add_option("--model", arguments.model, "preset name or path of a config.json")->required();
  app.add_option("--dtype", arguments.dtype, "replaces the model's dtype");
  app.add_option("--topology", arguments.topology, "for example tp=4,dcp=4");
  app.add_option("--ranks", arguments.ranks, "ranks of this process, for example 0-1; default: all");
  app.add_option("--page-size", arguments.rank.page_size, "tokens of a page")->check(CLI::Range(1u, 65536u));
  app.add_option("--pages", arguments.rank.pages, "pages of each rank")
      ->required()
      ->check(CLI::Range(1u, 1u << 30));
  app.add_option("--draft-layers", arguments.draft_layers, "layers of the draft model")
      ->check(CLI::Range(0u, 64u));
  app.add_option("--rooms", arguments.rank.rooms, "requests alive at once: window pages and state slots")
      ->check(CLI::Range(1u, 65536u));
  app.add_option("--aux-slots", arguments.rank.aux_slots, "aux rows of each rank")
      ->check(CLI::Range(1u, 65536u));
  app.add_option("--seed", arguments.rank.seed, "of page order and corruption");
  app.add_flag("--scatter,!--dense", arguments.rank.scatter,
               "pages of a room in random order (default) or not");
  CLI11_PARSE(app, argc, argv);
  std::signal(SIGPIPE, SIG_IGN);
  const auto done = kvferry::run(std::move(arguments));
  if (!done) {
    std::fprintf(stderr, "kvferry-synthetic-engine: %s\n", done.error().message.c_str());
    return 1;
  }
  return 0;
}
