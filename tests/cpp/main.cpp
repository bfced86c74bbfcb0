// Runs every C++ test, or those whose name contains an argument, without those whose name contains
// one that begins with a minus. One that takes longer than LMI_TEST_TIMEOUT_S (600) ends the run
// with its name.
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

namespace {

bool is_asked_for(const char* name, int argc, char** argv) {
  bool has_names = false;
  bool is_named = false;
  for (int i = 1; i < argc; ++i) {
    if (argv[i][0] == '-' && std::strstr(name, argv[i] + 1) != nullptr) return false;
    has_names |= argv[i][0] != '-';
    is_named |= std::strstr(name, argv[i]) != nullptr;
  }
  return is_named || !has_names;
}

}  // namespace

int main(int argc, char** argv) {
  int num_passed = 0;
  int num_failed = 0;
  for (const lmi::test::Case& test : lmi::test::cases()) {
    if (!is_asked_for(test.name.c_str(), argc, argv)) continue;
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
