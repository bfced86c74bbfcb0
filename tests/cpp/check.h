// The test harness: TEST registers a case, EXPECT and its kin throw with place and values.
#pragma once

#include <cstdlib>
#include <string>
#include <vector>

#include "common/check.h"

namespace lmi::test {

struct Case {
  std::string name;
  void (*run)();
};

std::vector<Case>& cases();

struct Registration {
  Registration(const char* name, void (*run)()) { cases().push_back({name, run}); }
};

}  // namespace lmi::test

#define TEST(name)                                                                \
  static void test_##name();                                                      \
  static const ::lmi::test::Registration registration_##name(#name, test_##name); \
  static void test_##name()

#define EXPECT(condition, ...) LMI_CHECK(condition __VA_OPT__(, ) __VA_ARGS__)

#define EXPECT_EQ(left, right)                                                             \
  do {                                                                                     \
    const auto& left_value = (left);                                                       \
    const auto& right_value = (right);                                                     \
    if (!(left_value == right_value)) {                                                    \
      ::lmi::detail::fail(__FILE__, __LINE__, #left " == " #right, left_value, " versus ", \
                          right_value);                                                    \
    }                                                                                      \
  } while (false)

// The statement throws lmi::Error whose message contains the text.
#define EXPECT_ERROR(statement, text)                                                       \
  do {                                                                                      \
    std::string message = "no error";                                                       \
    try {                                                                                   \
      statement;                                                                            \
    } catch (const ::lmi::Error& error) {                                                   \
      message = error.what();                                                               \
    }                                                                                       \
    if (message.find(text) == std::string::npos) {                                          \
      ::lmi::detail::fail(__FILE__, __LINE__, #statement, "no '", text, "' in: ", message); \
    }                                                                                       \
  } while (false)
