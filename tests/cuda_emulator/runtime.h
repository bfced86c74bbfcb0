// The runtime layer (csrc/cuda/runtime.cuh) on the emulator, whose device memory is the host's.
#pragma once

#include <chrono>
#include <cstdlib>
#include <cstring>

#include "cuda/launch.cuh"
#include "cuda_emulator/stream.h"

namespace lmi::cuda::runtime {

struct Event {
  void* stream = nullptr;
  uint64_t position = 0;
};

inline int32_t use_device(int32_t) { return kOk; }

// As if it were the oldest that has all that kernels can use.
inline int32_t find_compute_major(int32_t* major) {
  *major = 9;
  return kOk;
}

inline int32_t create_stream(void** stream) {
  *stream = emulator::create_stream();
  return kOk;
}
inline void destroy_stream(void* stream) { emulator::destroy_stream(stream); }
inline int32_t synchronize(void* stream) {
  return emulator::run_until(stream, emulator::position(stream));
}

inline int32_t create_event(void** event) {
  *event = new Event;
  return kOk;
}
inline void destroy_event(void* event) { delete static_cast<Event*>(event); }
inline int32_t record_event(void* event, void* stream) {
  *static_cast<Event*>(event) = {stream, emulator::position(stream)};
  return kOk;
}
inline int32_t wait_for_event(void* event) {
  const Event& recorded = *static_cast<Event*>(event);
  return recorded.stream == nullptr ? kOk : emulator::run_until(recorded.stream, recorded.position);
}

// Filled with what no step means.
inline int32_t allocate_device(void** memory, int64_t num_bytes) {
  *memory = std::aligned_alloc(256, (static_cast<size_t>(num_bytes) + 255) / 256 * 256);
  if (*memory == nullptr) return fail("memory: none is left");
  std::memset(*memory, 0x7f, static_cast<size_t>(num_bytes));
  return kOk;
}
inline void free_device(void* memory) { std::free(memory); }
inline int32_t allocate_pinned(void** memory, int64_t num_bytes) {
  return allocate_device(memory, num_bytes);
}
inline void free_pinned(void* memory) { std::free(memory); }

inline int32_t upload(void* target, const void* source, int64_t num_bytes, void* stream) {
  return emulator::enqueue(stream, [=] {
    std::memcpy(target, source, static_cast<size_t>(num_bytes));
    return kOk;
  });
}
inline int32_t download(void* target, const void* source, int64_t num_bytes, void* stream) {
  return upload(target, source, num_bytes, stream);
}

inline int32_t clear(void* memory, int64_t num_bytes, void* stream) {
  return emulator::enqueue(stream, [=] {
    std::memset(memory, 0, static_cast<size_t>(num_bytes));
    return kOk;
  });
}

inline int32_t begin_capture(void* stream) { return emulator::begin_capture(stream); }
inline int32_t end_capture(void* stream, void** graph) {
  emulator::Graph captured;
  const int32_t status = emulator::end_capture(stream, &captured);
  *graph = status == kOk ? new emulator::Graph(captured) : nullptr;
  return status;
}
inline int32_t launch_graph(void* graph, void* stream) {
  for (const emulator::Work& work : **static_cast<emulator::Graph*>(graph)) {
    (void)emulator::enqueue(stream, work);
  }
  return kOk;
}
inline void destroy_graph(void* graph) { delete static_cast<emulator::Graph*>(graph); }

template <typename Call>
int32_t measure(const Call& call, float* milliseconds) {
  const auto begin = std::chrono::steady_clock::now();
  const int32_t status = call();
  const std::chrono::duration<float, std::milli> taken = std::chrono::steady_clock::now() - begin;
  *milliseconds = taken.count();
  return status;
}

inline int32_t enqueue(void* stream, const emulator::Work& work) {
  return emulator::enqueue(stream, work);
}

}  // namespace lmi::cuda::runtime
