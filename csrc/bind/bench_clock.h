// The clock that kernels are timed with.
#pragma once

#include <cstdint>
#include <ctime>

namespace lmi {

// Seconds of CPU time for one thread, which a busy machine changes little; else of the wall clock.
inline double read_clock(int32_t num_threads) {
  timespec time{};
  clock_gettime(num_threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

}  // namespace lmi
