#include "tools/cli/demo/trace.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <fstream>
#include <random>
#include <sstream>

#include "tools/engine/protocol.h"

namespace kvferry {
namespace {

constexpr std::uint64_t kIdMax = (1ull << 63) - 1;

Result<TraceRequest> parse_row(std::string_view line) {
  TraceRequest request;
  KVF_TRY(const nlohmann::json row, parse_line(line));
  KVF_TRY(request.timestamp_ms, read_number(row, "timestamp", 0, kIdMax));
  KVF_TRY(request.input_tokens, read_number(row, "input_length", 1, kTraceTokensMax));
  KVF_TRY(request.output_tokens, read_number(row, "output_length", 0, kTraceTokensMax));
  const auto ids = row.find("hash_ids");
  if (ids == row.end() || !ids->is_array()) {
    return fail(Code::kInvalid, "field hash_ids: missing, or not an array");
  }
  const std::uint64_t blocks = (request.input_tokens + kTraceBlockTokens - 1) / kTraceBlockTokens;
  if (ids->size() > blocks) {
    return fail(Code::kInvalid, "field hash_ids: {} ids, but {} tokens have {} blocks of {}", ids->size(),
                request.input_tokens, blocks, kTraceBlockTokens);
  }
  for (const nlohmann::json& id : *ids) {
    if (!id.is_number_unsigned() || id.get<std::uint64_t>() > kIdMax) {
      return fail(Code::kInvalid, "field hash_ids: entry {} is not an integer from 0 to {}",
                  request.hash_ids.size(), kIdMax);
    }
    request.hash_ids.push_back(id.get<std::uint64_t>());
  }
  return request;
}

}  // namespace

Result<std::vector<TraceRequest>> parse_trace(std::string_view text, std::string_view source,
                                              std::uint64_t rows_max) {
  std::vector<TraceRequest> trace;
  for (std::uint64_t number = 1; !text.empty() && trace.size() < rows_max; ++number) {
    const std::size_t end = text.find('\n');
    std::string_view line = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) {
      continue;
    }
    if (line.size() > kProtocolLineMax) {
      return fail(Code::kInvalid, "{}:{}: {} bytes in one line; at most {} are read", source, number,
                  line.size(), kProtocolLineMax);
    }
    auto request = parse_row(line);
    if (!request) {
      return fail(Code::kInvalid, "{}:{}: {}", source, number, request.error().message);
    }
    trace.push_back(*std::move(request));
  }
  if (trace.empty()) {
    return fail(Code::kInvalid, "{}: no request in it", source);
  }
  return trace;
}

Result<std::vector<TraceRequest>> load_trace(const std::string& path, std::uint64_t rows_max) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) {
    return fail(errno_error("cannot read trace " + path, errno));
  }
  if (!S_ISREG(status.st_mode) || static_cast<std::uint64_t>(status.st_size) > kTraceFileBytesMax) {
    return fail(Code::kInvalid, "trace {}: not a regular file of at most {} bytes", path, kTraceFileBytesMax);
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    return fail(errno_error("cannot read trace " + path, errno));
  }
  std::ostringstream text;
  text << file.rdbuf();
  return parse_trace(text.str(), path, rows_max);
}

namespace {

struct Conversation {
  std::uint64_t tokens = 0;
  std::vector<std::uint64_t> full_blocks;
};

// Shares and medians follow the published conversation trace in shape, scaled down to what one machine moves
// in a demo.
constexpr std::uint64_t kSystemPrompts = 3;
constexpr std::uint64_t kSystemPromptBlocks[kSystemPrompts] = {1, 2, 4};
constexpr double kTurnTokensLogMean = 6.6;   // median e^6.6 = 735 tokens
constexpr double kTurnTokensLogSigma = 1.1;  // 1 turn of 20 is longer than 4,500 tokens
constexpr std::uint64_t kTurnTokensMax = 24'000;
constexpr std::uint64_t kConversationTokensMax = 40'000;

TraceRequest next_turn(Conversation& conversation, std::uint64_t turn_tokens, std::uint64_t& next_id) {
  conversation.tokens += turn_tokens;
  while ((conversation.full_blocks.size() + 1) * kTraceBlockTokens <= conversation.tokens) {
    conversation.full_blocks.push_back(next_id++);
  }
  TraceRequest request;
  request.input_tokens = conversation.tokens;
  request.hash_ids = conversation.full_blocks;
  if (conversation.tokens % kTraceBlockTokens != 0) {
    request.hash_ids.push_back(next_id++);
  }
  return request;
}

}  // namespace

std::vector<TraceRequest> generate_trace(std::uint64_t rows, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::lognormal_distribution<double> turn(kTurnTokensLogMean, kTurnTokensLogSigma);
  std::uint64_t next_id = 0;
  std::vector<std::vector<std::uint64_t>> prompts;
  for (const std::uint64_t blocks : kSystemPromptBlocks) {
    auto& prompt = prompts.emplace_back();
    while (prompt.size() < blocks) {
      prompt.push_back(next_id++);
    }
  }
  std::vector<Conversation> open;
  std::vector<TraceRequest> trace;
  std::uint64_t now_ms = 0;
  while (trace.size() < rows) {
    std::size_t chosen = random() % (open.size() + 2);
    if (chosen >= open.size()) {
      const auto& prompt = prompts[random() % prompts.size()];
      open.push_back({prompt.size() * kTraceBlockTokens, prompt});
      chosen = open.size() - 1;
    }
    const double drawn = std::min(turn(random), static_cast<double>(kTurnTokensMax));
    const auto tokens = std::max<std::uint64_t>(16, static_cast<std::uint64_t>(std::llround(drawn)));
    TraceRequest request = next_turn(open[chosen], tokens, next_id);
    request.timestamp_ms = now_ms;
    request.output_tokens = 1 + random() % 800;
    now_ms += random() % 2000;
    trace.push_back(std::move(request));
    if (open[chosen].tokens > kConversationTokensMax) {
      open.erase(open.begin() + static_cast<std::ptrdiff_t>(chosen));
    }
  }
  return trace;
}

std::string print_trace(const std::vector<TraceRequest>& trace) {
  std::string text;
  for (const TraceRequest& request : trace) {
    text += fmt::format(
        "{{\"timestamp\": {}, \"input_length\": {}, \"output_length\": {}, \"hash_ids\": [{}]}}\n",
        request.timestamp_ms, request.input_tokens, request.output_tokens, fmt::join(request.hash_ids, ", "));
  }
  return text;
}

std::uint64_t PrefixCache::hit_tokens(const TraceRequest& request) const {
  const auto miss = std::find_if(request.hash_ids.begin(), request.hash_ids.end(),
                                 [&](std::uint64_t id) { return !seen_.contains(id); });
  const auto blocks = static_cast<std::uint64_t>(miss - request.hash_ids.begin());
  return std::min(blocks * kTraceBlockTokens, request.input_tokens);
}

void PrefixCache::add(const TraceRequest& request, std::uint64_t tokens) {
  for (std::size_t block = 0; block < request.hash_ids.size(); ++block) {
    const std::uint64_t end = std::min((block + 1) * kTraceBlockTokens, request.input_tokens);
    if (end <= tokens) {
      seen_.insert(request.hash_ids[block]);
    }
  }
}

}  // namespace kvferry
