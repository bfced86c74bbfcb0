// Memory of the step list: pinned and device buffers, which the runtime frees with their owner.
#pragma once

#include <cstdint>

#include "cuda/runtime.cuh"

namespace lmi::cuda {

class PinnedMemory {
 public:
  PinnedMemory() = default;
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;
  ~PinnedMemory() {
    if (data_ != nullptr) runtime::free_pinned(data_);
  }
  int32_t allocate(int64_t num_bytes) { return runtime::allocate_pinned(&data_, num_bytes); }
  uint8_t* data() const { return static_cast<uint8_t*>(data_); }

 private:
  void* data_ = nullptr;
};

// Room for what a step has seldom and much of, on both sides; it grows.
class GrowingUpload {
 public:
  GrowingUpload() = default;
  GrowingUpload(const GrowingUpload&) = delete;
  GrowingUpload& operator=(const GrowingUpload&) = delete;
  ~GrowingUpload() { clear(); }

  // Nothing may be under way that reads it.
  int32_t grow(int64_t num_bytes) {
    clear();
    if (const int32_t status = runtime::allocate_pinned(&host_, num_bytes)) return status;
    if (const int32_t status = runtime::allocate_device(&device_, num_bytes)) return status;
    num_bytes_ = num_bytes;
    return 0;
  }
  int64_t num_bytes() const { return num_bytes_; }
  uint8_t* host() const { return static_cast<uint8_t*>(host_); }
  uint8_t* device() const { return static_cast<uint8_t*>(device_); }

 private:
  void clear() {
    if (host_ != nullptr) runtime::free_pinned(host_);
    if (device_ != nullptr) runtime::free_device(device_);
    host_ = device_ = nullptr;
    num_bytes_ = 0;
  }

  void* host_ = nullptr;
  void* device_ = nullptr;
  int64_t num_bytes_ = 0;
};

}  // namespace lmi::cuda
