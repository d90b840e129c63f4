#include "tools/cli/bench/scrape.h"

#include <cstdlib>
#include <optional>
#include <utility>

#include "common/http/client.h"

namespace kvferry {

double sum_counter(std::string_view text, std::string_view name) {
  double sum = 0;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (line.starts_with(name) && line.size() > name.size() &&
        (line[name.size()] == '{' || line[name.size()] == ' ')) {
      // Label values of ours have no blanks.
      sum += std::strtod(std::string(line.substr(line.rfind(' ') + 1)).c_str(), nullptr);
    }
  }
  return sum;
}

Result<double> scrape_counter(const std::string& address, std::string_view name) {
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
  KVF_TRY(const HttpResponse response, *std::move(answer));
  if (response.status != 200) {
    return fail(Code::kUnavailable, "http://{}/metrics answers with {}", address, response.status);
  }
  return sum_counter(response.body, name);
}

}  // namespace kvferry
