#pragma once
// What is said about repeated measurements. Pure.

#include <vector>

namespace kvferry {

struct Spread {
  double median = 0;
  double min = 0;
  double max = 0;
};
/// Of an even number of samples the median is the mean of the two in the middle; all zero without samples.
Spread spread(std::vector<double> samples);

/// The rate of two runs of equal work after each other. 0 when either is.
double harmonic_mean(double a, double b);

}  // namespace kvferry
