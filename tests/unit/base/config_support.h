#pragma once
// Configurations of the tests: a small good one, changed in one place by each case.

#include <sys/stat.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "common/base/unique_fd.h"
#include "common/daemon/config.h"

namespace kvferry::test {

using Lines = std::vector<std::string>;

/// The least that is a configuration, with `patch` (a JSON merge patch) applied to it.
inline nlohmann::json config_with(const std::string& patch) {
  nlohmann::json document = {{"model", "llama-3.1-8b"}};
  document.merge_patch(nlohmann::json::parse(patch));
  return document;
}

/// The problems of a configuration, one a line, without the name of their source; none when it is good.
inline Lines problems_of(Role role, const nlohmann::json& document) {
  const auto config = parse_daemon_config(role, document.dump(), "test.json");
  if (config) {
    return {};
  }
  CHECK(config.error().code == Code::kInvalid);
  Lines out;
  for (std::size_t at = 0; at <= config.error().message.size();) {
    const std::size_t end = config.error().message.find('\n', at);
    const std::string line = config.error().message.substr(at, end - at);
    REQUIRE(line.starts_with("test.json: "));
    out.push_back(line.substr(11));
    at = end == std::string::npos ? config.error().message.size() + 1 : end + 1;
  }
  return out;
}

/// A good configuration, or the end of the test.
inline DaemonConfig good_config(Role role, const nlohmann::json& document) {
  auto config = parse_daemon_config(role, document.dump(), "test.json");
  if (!config) {
    FAIL(config.error().message);
  }
  return *std::move(config);
}

/// A file with that text and mode, gone with the object.
class TextFile {
 public:
  TextFile(const std::string& text, unsigned mode) {
    std::string name = "/tmp/kvferry-test-XXXXXX";
    const UniqueFd fd(::mkstemp(name.data()));
    REQUIRE(fd);
    REQUIRE(::write(fd.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size()));
    REQUIRE(::fchmod(fd.get(), mode) == 0);
    path_ = name;
  }
  ~TextFile() { ::unlink(path_.c_str()); }
  TextFile(const TextFile&) = delete;
  TextFile& operator=(const TextFile&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace kvferry::test
