// Waiting without giving up the core.
#pragma once

namespace lmi {

// Tells the core that this is a loop that waits.
inline void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace lmi
