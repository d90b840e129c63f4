#pragma once
// How many writes a fabric may post for what a fixture moves: by bytes, pages and chunks, and never by rows.

#include <string>
#include <vector>

#include "tests/support/fabric_fixture.h"

namespace kvferry::test {

/// What one write of a fabric can hold.
struct WriteSize {
  std::uint64_t bytes = 0;  // writes are at least half full, but for the last of a stretch
  std::uint64_t spans = 0;  // source rows apart that one write gathers
};

/// Narrow rows, so that many fit one write: thousands of them, strided on either side or sliced on either
/// side, in small and large pages, behind prefixes, in short chunks, long ones and one.
std::vector<FabricCase> many_rows();

/// Empty when the writes of all ChunkDone in `log` are within pairs * (2 * bytes / size.bytes + rows /
/// size.spans + 2 * destination pages + 2) and the aux fields of each job, and fewer than a sixth of the
/// rows.
std::string excess_writes(const FabricFixture& fixture, const EventLog& log, const WriteSize& size);

}  // namespace kvferry::test
