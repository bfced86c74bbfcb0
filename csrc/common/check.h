// LMI_CHECK: conditions that hold unless a caller is wrong; a failure says where and with what
// values.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace lmi {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Of a model of which nothing that is computed from now on is right.
class FinalError : public Error {
 public:
  using Error::Error;
};

// What a model was read from isn't there any more.
class LostFileError : public FinalError {
 public:
  using FinalError::FinalError;
};

namespace detail {

template <typename... Values>
[[noreturn]] void fail(const char* file, int line, const char* condition, const Values&... values) {
  std::ostringstream message;
  message << file << ':' << line << ": " << condition;
  if constexpr (sizeof...(values) > 0) {
    message << ": ";
    (message << ... << values);
  }
  throw Error(message.str());
}

}  // namespace detail
}  // namespace lmi

// LMI_CHECK(a == b, "a ", a, " differs from b ", b)
#define LMI_CHECK(condition, ...)                                                     \
  do {                                                                                \
    if (!(condition)) [[unlikely]]                                                    \
      ::lmi::detail::fail(__FILE__, __LINE__, #condition __VA_OPT__(, ) __VA_ARGS__); \
  } while (false)
