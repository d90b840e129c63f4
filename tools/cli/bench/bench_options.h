#pragma once
// What `kvferry bench` was asked for. Empty lists and zeros stand for what the chosen matrix says.

#include <cstdint>
#include <string>
#include <vector>

namespace kvferry {

struct BenchOptions {
  std::vector<std::string> models;
  std::vector<std::string> layouts;
  std::vector<std::string> fabrics;
  std::vector<std::uint64_t> tokens;  // of a room
  std::vector<std::uint32_t> rooms;   // in flight at once
  std::uint32_t layers = 0;           // that the models are cut to
  std::uint32_t rounds = 0;           // that count; one more is run before them and discarded
  double memory_gib = 0;              // for the pools of both sides together
  std::uint32_t page_size = 64;       // tokens
  std::uint32_t copy_threads = 0;     // of shm; 0: the daemon's default
  std::uint64_t seed = 1;             // of the page order
  std::string verify = "off";         // digests that the daemons compare by themselves
  bool quick = false;
  bool full = false;
  bool mix = false;
  bool idle = false;
  std::string json;     // file to write; empty: none
  std::string plot;     // likewise, SVG
  std::string compare;  // stored run to compare with; empty: none
  double tolerance = 0.15;
};

}  // namespace kvferry
