// Runs one fuzz target without libFuzzer: over its seeds, over the files of its corpus, and over a fixed
// number of mutations of both. A failure leaves the input in a file and says how to run it again.
//
//   replay_TARGET [--corpus FOLDER] [--mutations N]     KVF_SEED=<number> makes other mutations
//   replay_TARGET FILE...                               these inputs only
//   replay_TARGET --write-seeds FOLDER                  for libFuzzer, which wants files

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/mutate.h"

namespace kvferry::fuzz {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kSeed = 20240607;

std::string current;  // the input that runs, for the handler
std::string program;

// Only what a signal handler may do is a write of bytes that are there already; that the stream functions are
// not among it cannot make things worse, because the process ends here.
void save_current(int signal) {
  const std::string path = program + ".failed";
  std::ofstream(path, std::ios::binary) << current;
  std::fprintf(stderr, "the input of %zu bytes lies in %s\n", current.size(), path.c_str());
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

std::string read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

void run(const std::string& input) {
  current = input;
  LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(current.data()), current.size());
}

std::vector<fs::path> files_of(const fs::path& folder) {
  std::vector<fs::path> files;
  if (fs::is_directory(folder)) {
    for (const auto& entry : fs::directory_iterator(folder)) {
      files.push_back(entry.path());
    }
  }
  std::sort(files.begin(), files.end());
  return files;
}

int write_seeds(const fs::path& folder) {
  fs::create_directories(folder);
  std::size_t number = 0;
  for (const std::string& seed : seeds()) {
    std::ofstream(folder / ("seed-" + std::to_string(number++)), std::ios::binary) << seed;
  }
  return 0;
}

int replay(const fs::path& folder, std::uint64_t mutations) {
  std::vector<std::string> corpus = seeds();
  for (const fs::path& file : files_of(folder)) {
    corpus.push_back(read(file));
  }
  for (const std::string& input : corpus) {
    run(input);
  }
  test::Rng random(test::test_seed(kSeed));
  for (std::uint64_t i = 0; i < mutations; ++i) {
    run(mutate(corpus, random));
  }
  std::printf("%zu inputs of the corpus, %llu mutations\n", corpus.size(),
              static_cast<unsigned long long>(mutations));
  return 0;
}

int main_of(int argc, char** argv) {
  program = fs::path(argv[0]).filename().string();
  for (const int signal : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE}) {
    std::signal(signal, save_current);
  }
  fs::path folder;
  std::uint64_t mutations = 0;
  bool files = false;
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    if (option == "--corpus" && i + 1 < argc) {
      folder = argv[++i];
    } else if (option == "--mutations" && i + 1 < argc) {
      mutations = std::strtoull(argv[++i], nullptr, 10);
    } else if (option == "--write-seeds" && i + 1 < argc) {
      return write_seeds(argv[++i]);
    } else {
      files = true;
      run(read(option));
    }
  }
  return files ? 0 : replay(folder, mutations);
}

}  // namespace
}  // namespace kvferry::fuzz

int main(int argc, char** argv) {
  return kvferry::fuzz::main_of(argc, argv);
}
