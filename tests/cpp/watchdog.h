// Ends the process with the name of a test that hangs.
#pragma once

#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>

namespace lmi::test {

// While it lives, its test may take so many seconds. One at a time.
class Watchdog {
 public:
  Watchdog(const char* name, unsigned seconds) {
    name_ = name;
    std::signal(SIGALRM, &Watchdog::end);
    alarm(seconds);
  }
  ~Watchdog() { alarm(0); }

 private:
  static void end(int) {
    say("HUNG ");
    say(name_);
    say("\n");
    _exit(3);
  }

  // What a signal's handler may do: printf isn't among it.
  static void say(const char* text) {
    if (write(STDOUT_FILENO, text, std::strlen(text)) < 0) _exit(4);
  }

  static inline const char* name_ = "";
};

// Seconds for each test; sanitizers and emulators are slow.
inline unsigned test_timeout_s() {
  const char* given = std::getenv("LMI_TEST_TIMEOUT_S");
  return given == nullptr ? 600 : static_cast<unsigned>(std::strtoul(given, nullptr, 10));
}

}  // namespace lmi::test
