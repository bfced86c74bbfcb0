// Launching on NVIDIA hardware; included by launch.cuh.
#pragma once

#include "cuda/launch.cuh"

namespace lmi::cuda {

constexpr int kFreeSharedBytes = 48 << 10;  // more must be asked for

// Keeps what the error says; `name` is of what failed.
inline int32_t check(const char* name, cudaError_t error) {
  if (error == cudaSuccess) return kOk;
  error_text() = std::string(name) + ": " + cudaGetErrorString(error);
  (void)cudaGetLastError();  // it was reported: the next call starts afresh
  return static_cast<int32_t>(error);
}

// Of a block's shared memory on the calling thread's device.
inline int32_t find_most_shared_bytes(int32_t* num_bytes) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(num_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  return check("a device's shared memory", error);
}

// Enqueues the kernel; `name` is for messages. An empty grid is no work.
template <typename Args>
int32_t launch(const char* name, void (*kernel)(Args), Grid grid, int num_threads, int shared_bytes,
               void* stream, const Args& args) {
  if (is_empty(grid)) return kOk;
  if (const int32_t status = check_grid(name, grid)) return status;
  cudaError_t error = cudaSuccess;
  if (shared_bytes > kFreeSharedBytes) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  }
  if (error == cudaSuccess) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y),
                          static_cast<unsigned>(grid.z));
    config.blockDim = dim3(static_cast<unsigned>(num_threads));
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.stream = static_cast<cudaStream_t>(stream);
    cudaLaunchAttribute attribute = {};
    if (uses_dependent_launch()) {
      attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attribute.val.programmaticStreamSerializationAllowed = 1;
      config.attrs = &attribute;
      config.numAttrs = 1;
    }
    error = cudaLaunchKernelEx(&config, kernel, args);
  }
  return check(name, error);
}

}  // namespace lmi::cuda
