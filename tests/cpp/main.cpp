// Runs every C++ test, or those whose name contains the first argument. One that takes longer than
// LMI_TEST_TIMEOUT_S (600) ends the run with its name.
#include <cstdio>
#include <cstring>
#include <exception>

#include "check.h"
#include "watchdog.h"

namespace lmi::test {

std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

}  // namespace lmi::test

int main(int argc, char** argv) {
  const char* filter = argc > 1 ? argv[1] : "";
  int num_passed = 0;
  int num_failed = 0;
  for (const lmi::test::Case& test : lmi::test::cases()) {
    if (std::strstr(test.name.c_str(), filter) == nullptr) continue;
    try {
      const lmi::test::Watchdog watchdog(test.name.c_str(), lmi::test::test_timeout_s());
      test.run();
      ++num_passed;
    } catch (const std::exception& error) {
      ++num_failed;
      std::printf("FAILED %s\n  %s\n", test.name.c_str(), error.what());
    }
  }
  std::printf("C++ tests: %d passed, %d failed\n", num_passed, num_failed);
  return num_failed == 0 && num_passed > 0 ? 0 : 1;
}
