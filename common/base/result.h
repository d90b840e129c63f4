#pragma once
// Result<T>: a value or an Error. A thin layer over tl::expected so that a dropped error is a compiler
// warning.

#include <fmt/format.h>
#include <tl/expected.hpp>

#include <utility>

#include "common/base/error.h"

namespace kvferry {

template <class T>
class [[nodiscard]] Result : public tl::expected<T, Error> {
  using Base = tl::expected<T, Error>;

 public:
  using Base::Base;
  Result(Base base) : Base(std::move(base)) {}  // NOLINT: implicit on purpose, as for the base class
};

/// An Error ready to be returned from any function that returns a Result.
template <class... Args>
tl::unexpected<Error> fail(Code code, fmt::format_string<Args...> format, Args&&... args) {
  return tl::unexpected<Error>(Error{code, fmt::format(format, std::forward<Args>(args)...)});
}
inline tl::unexpected<Error> fail(Error error) {
  return tl::unexpected<Error>(std::move(error));
}

}  // namespace kvferry

#define KVF_CONCAT_INNER(a, b) a##b
#define KVF_CONCAT(a, b) KVF_CONCAT_INNER(a, b)

/// KVF_TRY(auto value, expression): declares `value`, or returns the expression's Error from this function.
#define KVF_TRY(declaration, expression) KVF_TRY_IMPL(KVF_CONCAT(kvf_try_, __LINE__), declaration, expression)
#define KVF_TRY_IMPL(name, declaration, expression)  \
  auto name = (expression);                          \
  if (!name) {                                       \
    return ::kvferry::fail(std::move(name).error()); \
  }                                                  \
  declaration = *std::move(name)

/// KVF_TRY_VOID(expression): returns the expression's Error from this function, if it has one.
#define KVF_TRY_VOID(expression)                                 \
  do {                                                           \
    auto kvf_try_result = (expression);                          \
    if (!kvf_try_result) {                                       \
      return ::kvferry::fail(std::move(kvf_try_result).error()); \
    }                                                            \
  } while (false)
