// Activations of a number.
#pragma once

#include "cuda/launch.cuh"

namespace lmi::cuda {

// x / (1 + exp(-x)); of a large negative x, where exp overflows, 0.
__device__ inline float silu(float x) { return x / (1.0f + exp_of(-x)); }

__device__ inline float gelu_tanh(float x) {
  constexpr float kSqrt2OverPi = 0.7978845608028654f;
  return 0.5f * x * (1.0f + tanh_of(kSqrt2OverPi * (x + 0.044715f * x * x * x)));
}

__device__ inline float gelu(float x) {
  constexpr float kSqrtOfHalf = 0.7071067811865476f;
  return 0.5f * x * (1.0f + erf_of(x * kSqrtOfHalf));
}

// A NaN stays one in this and the next.
__device__ inline float relu(float x) { return x < 0.0f ? 0.0f : x; }

__device__ inline float clipped(float x, float least, float most) {
  if (x > most) return most;
  return x < least ? least : x;
}

}  // namespace lmi::cuda
