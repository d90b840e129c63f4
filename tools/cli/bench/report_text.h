#pragma once
// The bench's table: a head that says where and how, a block for each cell, and the daemons at the end. Pure.

#include <string>

#include "tools/cli/bench/bench_report.h"

namespace kvferry {

std::string report_head(const BenchReport& report);
/// The title of a group and of its columns.
std::string group_head(const BenchGroup& group);
/// A cell of the group, or why it was not run.
std::string cell_rows(const BenchReport& report, const CellResult& cell);
/// How much of the machine other processes had; empty where that was little.
std::string busy_warning(const BenchReport& report);
std::string link_rows(const BenchReport& report);

}  // namespace kvferry
