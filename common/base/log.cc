#include "common/base/log.h"

#include <unistd.h>

#include <atomic>
#include <cstdlib>

namespace kvferry::log {
namespace {

std::atomic<Level> g_level{Level::kInfo};

bool under_journald() {
  static const bool value = std::getenv("JOURNAL_STREAM") != nullptr;  // NOLINT: read once
  return value;
}

std::string_view name(Level level) {
  switch (level) {
    case Level::kDebug:
      return "debug";
    case Level::kInfo:
      return "info";
    case Level::kWarn:
      return "warn";
    case Level::kError:
      return "error";
  }
  return "error";
}

std::string_view priority(Level level) {
  switch (level) {
    case Level::kDebug:
      return "<7>";
    case Level::kInfo:
      return "<6>";
    case Level::kWarn:
      return "<4>";
    case Level::kError:
      return "<3>";
  }
  return "<3>";
}

// Newlines and control characters from a peer must not forge log lines.
void append_value(std::string& out, std::string_view value) {
  bool quote = value.empty();
  for (const char c : value) {
    quote = quote || static_cast<unsigned char>(c) <= ' ' || c == '"' || c == '=' || c == '\\';
  }
  if (!quote) {
    out.append(value);
    return;
  }
  out.push_back('"');
  for (const char c : value) {
    if (c == '"' || c == '\\') {
      out.push_back('\\');
      out.push_back(c);
    } else if (static_cast<unsigned char>(c) < ' ') {
      fmt::format_to(std::back_inserter(out), "\\x{:02x}", static_cast<unsigned char>(c));
    } else {
      out.push_back(c);
    }
  }
  out.push_back('"');
}

}  // namespace

void set_level(Level level) {
  g_level.store(level, std::memory_order_relaxed);
}
bool enabled(Level level) {
  return level >= g_level.load(std::memory_order_relaxed);
}

bool parse_level(std::string_view text, Level& out) {
  for (const Level level : {Level::kDebug, Level::kInfo, Level::kWarn, Level::kError}) {
    if (text == name(level)) {
      out = level;
      return true;
    }
  }
  return false;
}

void write(Level level, std::string_view message, std::initializer_list<Field> fields) {
  std::string line;
  if (under_journald()) {
    line.append(priority(level));
  }
  line.append(name(level)).append(" ").append(message);
  for (const Field& field : fields) {
    line.push_back(' ');
    line.append(field.key).push_back('=');
    append_value(line, field.value);
  }
  line.push_back('\n');
  // A full disk or closed pipe must not stop the daemon: the result is deliberately ignored.
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace kvferry::log
