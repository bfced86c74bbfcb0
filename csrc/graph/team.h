// Threads that replay graphs together, each with scratch memory of its own.
#pragma once

#include <cstdint>
#include <vector>

#include "common/aligned_memory.h"
#include "common/thread_pool.h"
#include "cpu/kernels.h"

namespace lmi {

struct Team {
  // num_threads: with the one that replays. The others may use the cores that this one may.
  explicit Team(int32_t num_threads) : pool(num_threads), memory(num_threads * cpu::kScratchBytes) {
    for (int32_t i = 0; i < num_threads; ++i) {
      scratch.push_back({memory.data() + i * cpu::kScratchBytes, cpu::kScratchBytes});
    }
  }

  ThreadPool pool;
  AlignedMemory memory;
  std::vector<cpu::Scratch> scratch;
};

}  // namespace lmi
