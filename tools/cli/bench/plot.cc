#include "tools/cli/bench/plot.h"

#include <cstdlib>
#include <vector>

#include "tools/cli/demo/child_process.h"

namespace kvferry {
namespace {

constexpr std::chrono::seconds kLimit{60};

Result<std::string> find_script(const std::filesystem::path& program_directory) {
  for (const std::filesystem::path& path :
       {program_directory / "../share/kvferry/plot.py", std::filesystem::path(KVF_PLOT_SCRIPT)}) {
    std::error_code error;
    if (std::filesystem::is_regular_file(path, error)) {
      return path.string();
    }
  }
  return fail(Code::kNotFound, "--plot: plot.py is neither in {}/../share/kvferry nor at {}",
              program_directory.string(), KVF_PLOT_SCRIPT);
}

Result<std::string> find_python() {
  const char* chosen = std::getenv("PYTHON");
  const std::vector<std::string> places =
      chosen != nullptr ? std::vector<std::string>{chosen}
                        : std::vector<std::string>{"/usr/bin/python3", "/usr/local/bin/python3"};
  for (const std::string& place : places) {
    std::error_code error;
    if (std::filesystem::is_regular_file(place, error)) {
      return place;
    }
  }
  return fail(Code::kNotFound, "--plot: no Python at {}; install python3, or set PYTHON to its path",
              places.front());
}

Result<void> run_script(const std::filesystem::path& program_directory, std::vector<std::string> arguments) {
  KVF_TRY(const std::string python, find_python());
  KVF_TRY(const std::string script, find_script(program_directory));
  arguments.insert(arguments.begin(), script);
  const std::string log =
      (std::filesystem::temp_directory_path() / fmt::format("kvferry-plot-{}.log", ::getpid())).string();
  KVF_TRY(ChildProcess child, ChildProcess::spawn({"plot.py", python, std::move(arguments), log}));
  child.close_stdin();
  const bool ended = child.wait(kLimit);
  const std::string said = child.log_tail();
  std::error_code ignored;
  std::filesystem::remove(log, ignored);
  if (!ended || !child.exited_well()) {
    return fail(Code::kNotFound, "--plot: {} {}: {}", python, ended ? child.status() : "does not end", said);
  }
  return {};
}

}  // namespace

Result<void> check_plot(const std::filesystem::path& program_directory) {
  return run_script(program_directory, {"--check"});
}

Result<void> draw_plot(const std::filesystem::path& program_directory, const std::string& run,
                       const std::string& svg) {
  return run_script(program_directory, {run, svg});
}

}  // namespace kvferry
