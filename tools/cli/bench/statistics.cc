#include "tools/cli/bench/statistics.h"

#include <algorithm>

namespace kvferry {

Spread spread(std::vector<double> samples) {
  if (samples.empty()) {
    return {};
  }
  std::sort(samples.begin(), samples.end());
  const std::size_t middle = samples.size() / 2;
  const double median =
      samples.size() % 2 == 1 ? samples[middle] : (samples[middle - 1] + samples[middle]) / 2;
  return {median, samples.front(), samples.back()};
}

double harmonic_mean(double a, double b) {
  return a > 0 && b > 0 ? 2 * a * b / (a + b) : 0;
}

}  // namespace kvferry
