#pragma once
// Structured log lines on stderr: `level message key=value ...`. Under systemd (JOURNAL_STREAM set) each line
// carries the syslog priority prefix that journald understands. Thread safe; one write per line.

#include <fmt/format.h>

#include <string>
#include <string_view>

namespace kvferry::log {

enum class Level : unsigned char { kDebug, kInfo, kWarn, kError };

/// Lines below `level` are dropped. Default kInfo.
void set_level(Level level);
bool enabled(Level level);
/// Parses "debug", "info", "warn", "error"; false when the text is none of them.
bool parse_level(std::string_view text, Level& out);

/// One key=value pair; values with blanks or quotes are quoted.
struct Field {
  std::string_view key;
  std::string value;
};
template <class T>
Field kv(std::string_view key, const T& value) {
  return Field{key, fmt::format("{}", value)};
}

void write(Level level, std::string_view message, std::initializer_list<Field> fields);

}  // namespace kvferry::log

#define KVF_LOG(level, message, ...)                        \
  do {                                                      \
    if (::kvferry::log::enabled(level)) {                   \
      ::kvferry::log::write(level, message, {__VA_ARGS__}); \
    }                                                       \
  } while (false)
#define KVF_LOG_DEBUG(message, ...) KVF_LOG(::kvferry::log::Level::kDebug, message __VA_OPT__(, ) __VA_ARGS__)
#define KVF_LOG_INFO(message, ...) KVF_LOG(::kvferry::log::Level::kInfo, message __VA_OPT__(, ) __VA_ARGS__)
#define KVF_LOG_WARN(message, ...) KVF_LOG(::kvferry::log::Level::kWarn, message __VA_OPT__(, ) __VA_ARGS__)
#define KVF_LOG_ERROR(message, ...) KVF_LOG(::kvferry::log::Level::kError, message __VA_OPT__(, ) __VA_ARGS__)
