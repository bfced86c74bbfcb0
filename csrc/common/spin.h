// Waiting without giving up the core.
#pragma once

#include <chrono>

namespace lmi {

// Tells the core that this is a loop that waits.
inline void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Whether the condition came to hold in time; it is asked once at least.
template <typename Condition>
bool spin_until(Condition&& condition, std::chrono::nanoseconds time) {
  constexpr int kPausesPerClockRead = 32;
  const auto end = std::chrono::steady_clock::now() + time;
  do {
    for (int i = 0; i < kPausesPerClockRead; ++i) {
      if (condition()) return true;
      cpu_pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

}  // namespace lmi
