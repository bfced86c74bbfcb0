// Launching on the emulator; included by csrc/cuda/launch.cuh.
#pragma once

#include <cstdlib>
#include <exception>

#include "cuda/launch.cuh"
#include "cuda_emulator/stream.h"

namespace lmi::cuda {

// As of sm_90, or what a test wants to have instead.
inline int32_t find_most_shared_bytes(int32_t* num_bytes) {
  const char* wanted = std::getenv("LMI_CUDA_EMULATOR_SHARED_BYTES");
  *num_bytes = wanted == nullptr ? 227 << 10 : std::atoi(wanted);
  return kOk;
}

template <typename Args>
int32_t launch(const char* name, void (*kernel)(Args), Grid grid, int num_threads, int shared_bytes,
               void* stream, const Args& args) {
  if (is_empty(grid)) return kOk;
  if (const int32_t status = check_grid(name, grid)) return status;
  return emulator::enqueue(stream, [=]() -> int32_t {
    try {
      emulator::run({static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y),
                     static_cast<unsigned>(grid.z)},
                    static_cast<unsigned>(num_threads), static_cast<size_t>(shared_bytes), [&] {
                      // Its own, as a device's are: no memory that a kernel could be early for.
                      const auto own_kernel = kernel;
                      const Args own = args;
                      emulator::enter_kernel();
                      own_kernel(own);
                      emulator::leave_kernel();
                    });
    } catch (const std::exception& error) {
      return fail(std::string(name) + ": " + error.what());
    }
    return kOk;
  });
}

}  // namespace lmi::cuda
