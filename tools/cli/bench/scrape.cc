#include "tools/cli/bench/scrape.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <optional>
#include <system_error>
#include <utility>

#include "common/http/client.h"

namespace kvferry {

namespace {

/// `work(line)` for each sample of the metric, until it returns false.
template <class Work>
void for_each_sample(std::string_view text, std::string_view name, const Work& work) {
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    const bool is_sample = line.starts_with(name) && line.size() > name.size() &&
                           (line[name.size()] == '{' || line[name.size()] == ' ');
    if (is_sample && !work(line)) {
      return;
    }
  }
}

}  // namespace

double sum_counter(std::string_view text, std::string_view name) {
  double sum = 0;
  for_each_sample(text, name, [&](std::string_view line) {
    sum += std::strtod(std::string(line.substr(line.rfind(' ') + 1)).c_str(), nullptr);
    return true;
  });
  return sum;
}

std::string label_of(std::string_view text, std::string_view name, std::string_view label) {
  std::string value;
  for_each_sample(text, name, [&](std::string_view line) {
    const std::string opening = std::string(label) + "=\"";
    const std::size_t at = line.find(opening);
    if (at != std::string_view::npos && (line[at - 1] == '{' || line[at - 1] == ',')) {
      const std::string_view rest = line.substr(at + opening.size());
      value = rest.substr(0, rest.find('"'));
    }
    return false;
  });
  return value;
}

std::uint32_t copy_threads_of(std::string_view carries) {
  constexpr std::string_view kShm = "shm ";
  if (!carries.starts_with(kShm)) {
    return 0;
  }
  carries.remove_prefix(kShm.size());
  std::uint32_t threads = 0;
  const auto [end, error] = std::from_chars(carries.data(), carries.data() + carries.size(), threads);
  return error == std::errc{} && end != carries.data() + carries.size() && *end == 'x' ? threads : 0;
}

Result<std::string> scrape(const std::string& address) {
  HttpFetch fetch;
  KVF_TRY(fetch.to, parse_host_port(address, std::nullopt));
  fetch.target = "/metrics";
  std::optional<Result<HttpResponse>> answer;
  boost::asio::io_context io;
  const auto pending =
      http_fetch(io, std::move(fetch), [&](Result<HttpResponse> response) { answer = std::move(response); });
  io.run();
  if (!answer) {
    return fail(Code::kInternal, "no answer from http://{}/metrics", address);
  }
  KVF_TRY(HttpResponse response, *std::move(answer));
  if (response.status != 200) {
    return fail(Code::kUnavailable, "http://{}/metrics answers with {}", address, response.status);
  }
  return std::move(response.body);
}

Result<double> scrape_counter(const std::string& address, std::string_view name) {
  KVF_TRY(const std::string text, scrape(address));
  return sum_counter(text, name);
}

}  // namespace kvferry
