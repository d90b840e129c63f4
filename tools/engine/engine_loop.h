#pragma once
// The event loop of one synthetic engine process: commands on one descriptor, events on another, and the
// daemon's events of every rank between them. Ends with "quit", with the end of its input, or when a rank is
// refused by its daemon. One thread.

#include <memory>
#include <string>
#include <vector>

#include "tools/engine/protocol.h"
#include "tools/engine/role.h"

namespace kvferry {

enum class EngineSide : unsigned char { kPrefill, kDecode };

class EngineLoop : public EventSink {
 public:
  struct Options {
    EngineSide side = EngineSide::kPrefill;
    RankOptions rank;
    std::vector<RankIndex> ranks;
    int commands = 0;  // descriptors; not owned
    int events = 1;
  };
  /// Creates the memory of every rank.
  static Result<std::unique_ptr<EngineLoop>> create(const Options& options);

  /// Runs until quit. An error is a daemon that refuses this engine for good.
  Result<void> run();
  void emit(const nlohmann::json& event) override;

 private:
  explicit EngineLoop(const Options& options) : options_(options) {}
  Result<void> attach_ranks(Instant now);
  bool read_events(Rank& rank, Instant now);
  void wait(bool busy, Instant now);
  void read_commands();
  void on_line(const std::string& line);
  nlohmann::json stats() const;

  Options options_;
  std::vector<Rank> ranks_;
  std::unique_ptr<EngineRole> role_;
  LineBuffer lines_;
  bool attached_ = false;  // what the router was told
  bool quit_ = false;
};

}  // namespace kvferry
