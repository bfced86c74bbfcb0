// What kernels need of a device, under one set of names. Kernels call nothing else, so that they
// run in the tests' emulator too, thread by thread on the host.
#pragma once

#include <cstdint>

#include "cuda/host_device.h"

namespace lmi::cuda {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};
struct i8 {
  uint8_t bits;
};
// 8-bit floats: four bits of exponent and no infinity, and five.
struct e4m3 {
  uint8_t bits;
};
struct e5m2 {
  uint8_t bits;
};
struct Pair {
  float low;
  float high;
};
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Vector {
  T at[kCount];
};
using Float4 = Vector<float, 4>;
using Word4 = Vector<uint32_t, 4>;

constexpr int kWarpSize = 32;
constexpr int kPrefetchBytes = 128;

}  // namespace lmi::cuda

#if defined(LMI_CUDA_EMULATOR)
#include "cuda_emulator/device.h"
#else
#include "cuda/nvidia.cuh"
#endif

namespace lmi::cuda {

__device__ inline int lane_id() { return static_cast<int>(threadIdx.x) % kWarpSize; }
__device__ inline int warp_id() { return static_cast<int>(threadIdx.x) / kWarpSize; }

// To 2^-21 of 1; NaN of NaN, which a minimum would drop.
__device__ inline float tanh_of(float value) {
  constexpr float kTwoLog2E = 2.8853900817779268f;
  constexpr float kLargest = 16.0f;  // from which on it is 1
  const float power = exp2_of(kTwoLog2E * (value > kLargest ? kLargest : value));
  return 1.0f - quotient_of(2.0f, power + 1.0f);
}

template <typename T>
__device__ inline T warp_sum(T value) {
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    value += shuffle_xor(value, distance);
  }
  return value;
}

__device__ inline float warp_max(float value) {
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    value = max_of(value, shuffle_xor(value, distance));
  }
  return value;
}

// The sum over the block's threads, the same in every thread and for every run. `partials`: shared,
// one per warp, free for other use again after the next barrier.
template <typename T>
__device__ inline T block_sum(T value, T* partials) {
  value = warp_sum(value);
  if (lane_id() == 0) partials[warp_id()] = value;
  block_barrier();
  const int num_warps = static_cast<int>(blockDim.x) / kWarpSize;
  T total = partials[0];
  for (int warp = 1; warp < num_warps; ++warp) total += partials[warp];
  return total;
}

template <typename T, int kWidth>
__device__ inline void load_floats(const T* source, float (&values)[kWidth]) {
  const auto vector = *reinterpret_cast<const Vector<T, kWidth>*>(source);
  for (int i = 0; i < kWidth; ++i) values[i] = to_float(vector.at[i]);
}

template <int kWidth>
__device__ inline void store_floats(float* target, const float (&values)[kWidth]) {
  Vector<float, kWidth> vector;
  for (int i = 0; i < kWidth; ++i) vector.at[i] = values[i];
  *reinterpret_cast<Vector<float, kWidth>*>(target) = vector;
}

// Rounded to T.
template <typename T, int kWidth>
__device__ inline void store_as(T* target, const float (&values)[kWidth]) {
  Vector<T, kWidth> vector;
  for (int i = 0; i < kWidth; ++i) vector.at[i] = from_float<T>(values[i]);
  *reinterpret_cast<Vector<T, kWidth>*>(target) = vector;
}

}  // namespace lmi::cuda
