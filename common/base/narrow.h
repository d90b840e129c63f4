#pragma once
// Integer conversions that cannot lose a value: narrow() for values our own code guarantees.

#include <utility>

#include "common/base/check.h"

namespace kvferry {

template <class To, class From>
constexpr To narrow(From value) {
  KVF_CHECK(std::in_range<To>(value));
  return static_cast<To>(value);
}

}  // namespace kvferry
