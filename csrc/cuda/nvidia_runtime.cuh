// The runtime layer (runtime.cuh) on NVIDIA hardware.
#pragma once

#include <cuda_runtime.h>

#include "cuda/launch.cuh"

namespace lmi::cuda::runtime {

// The calling thread's device from now on.
inline int32_t use_device(int32_t device) { return check("cudaSetDevice", cudaSetDevice(device)); }

// The first number of the calling thread's device's compute capability.
inline int32_t find_compute_major(int32_t* major) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(major, cudaDevAttrComputeCapabilityMajor, device);
  }
  return check("a device's compute capability", error);
}

// Work on it waits for no other stream's.
inline int32_t create_stream(void** stream) {
  return check(
      "cudaStreamCreate",
      cudaStreamCreateWithFlags(reinterpret_cast<cudaStream_t*>(stream), cudaStreamNonBlocking));
}
inline void destroy_stream(void* stream) {
  (void)cudaStreamDestroy(static_cast<cudaStream_t>(stream));
}
inline int32_t synchronize(void* stream) {
  return check("a step", cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
}

// Who waits for it sleeps.
inline int32_t create_event(void** event) {
  return check("cudaEventCreate",
               cudaEventCreateWithFlags(reinterpret_cast<cudaEvent_t*>(event),
                                        cudaEventDisableTiming | cudaEventBlockingSync));
}
inline void destroy_event(void* event) { (void)cudaEventDestroy(static_cast<cudaEvent_t>(event)); }
inline int32_t record_event(void* event, void* stream) {
  return check("cudaEventRecord",
               cudaEventRecord(static_cast<cudaEvent_t>(event), static_cast<cudaStream_t>(stream)));
}
inline int32_t wait_for_event(void* event) {
  return check("a step", cudaEventSynchronize(static_cast<cudaEvent_t>(event)));
}

inline int32_t allocate_pinned(void** memory, int64_t num_bytes) {
  return check("pinned memory", cudaMallocHost(memory, static_cast<size_t>(num_bytes)));
}
inline void free_pinned(void* memory) { (void)cudaFreeHost(memory); }
inline int32_t allocate_device(void** memory, int64_t num_bytes) {
  return check("device memory", cudaMalloc(memory, static_cast<size_t>(num_bytes)));
}
inline void free_device(void* memory) { (void)cudaFree(memory); }

// From and to pinned memory.
inline int32_t upload(void* target, const void* source, int64_t num_bytes, void* stream) {
  return check("an upload",
               cudaMemcpyAsync(target, source, static_cast<size_t>(num_bytes),
                               cudaMemcpyHostToDevice, static_cast<cudaStream_t>(stream)));
}
inline int32_t download(void* target, const void* source, int64_t num_bytes, void* stream) {
  return check("a download",
               cudaMemcpyAsync(target, source, static_cast<size_t>(num_bytes),
                               cudaMemcpyDeviceToHost, static_cast<cudaStream_t>(stream)));
}

// Zeros.
inline int32_t clear(void* memory, int64_t num_bytes, void* stream) {
  return check("clearing memory", cudaMemsetAsync(memory, 0, static_cast<size_t>(num_bytes),
                                                  static_cast<cudaStream_t>(stream)));
}

// Until end_capture, what this thread puts onto the stream is recorded and not run; other threads
// may wait for events meanwhile.
inline int32_t begin_capture(void* stream) {
  return check("a capture's begin", cudaStreamBeginCapture(static_cast<cudaStream_t>(stream),
                                                           cudaStreamCaptureModeThreadLocal));
}
inline int32_t end_capture(void* stream, void** graph) {
  cudaGraph_t recorded = nullptr;
  cudaError_t error = cudaStreamEndCapture(static_cast<cudaStream_t>(stream), &recorded);
  cudaGraphExec_t made = nullptr;
  if (error == cudaSuccess) error = cudaGraphInstantiateWithFlags(&made, recorded, 0);
  if (recorded != nullptr) (void)cudaGraphDestroy(recorded);
  *graph = made;
  return check("a capture", error);
}
inline int32_t launch_graph(void* graph, void* stream) {
  return check("a captured step", cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph),
                                                  static_cast<cudaStream_t>(stream)));
}
inline void destroy_graph(void* graph) {
  (void)cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph));
}

// How long the device takes for what a call puts onto the default stream.
template <typename Call>
int32_t measure(const Call& call, float* milliseconds) {
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  cudaError_t error = cudaEventCreate(&begin);
  if (error == cudaSuccess) error = cudaEventCreate(&end);
  if (error == cudaSuccess) error = cudaEventRecord(begin, nullptr);
  int32_t status = check("an event", error);
  if (status == kOk) status = call();
  if (status == kOk) {
    error = cudaEventRecord(end, nullptr);
    if (error == cudaSuccess) error = cudaEventSynchronize(end);
    if (error == cudaSuccess) error = cudaEventElapsedTime(milliseconds, begin, end);
    status = check("a measured call", error);
  }
  if (begin != nullptr) (void)cudaEventDestroy(begin);
  if (end != nullptr) (void)cudaEventDestroy(end);
  return status;
}

// A call of another library, which puts work onto the stream.
template <typename Call>
int32_t enqueue(void*, const Call& call) {
  return call();
}

}  // namespace lmi::cuda::runtime
