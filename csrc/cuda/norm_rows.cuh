// Rows that a block keeps in its registers, for norms.
#pragma once

#include "cuda/launch.cuh"

namespace lmi::cuda {

constexpr int kMaxThreads = 1024;
constexpr int kSteps = 4;  // vectors that a thread keeps

// Of a thread's vector number `step`.
template <int kWidth>
__device__ inline int column_of(int step) {
  return static_cast<int>(step * blockDim.x + threadIdx.x) * kWidth;
}

// This thread's vectors of a row; columns past the last are left as they are.
template <int kWidth>
__device__ inline void load_row(const float* row, int num_columns,
                                float (&values)[kSteps][kWidth]) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int column = column_of<kWidth>(step);
    if (column < num_columns) load_floats(row + column, values[step]);
  }
}

// The same plus `addend`, which also goes back to where the row came from.
template <int kWidth>
__device__ inline void add_to_row(const float* addend, int num_columns, float* row,
                                  float (&values)[kSteps][kWidth]) {
  float added[kSteps][kWidth] = {};
  load_row(addend, num_columns, added);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int column = column_of<kWidth>(step);
    for (int i = 0; i < kWidth; ++i) values[step][i] += added[step][i];
    if (column < num_columns) store_floats(row + column, values[step]);
  }
}

template <int kWidth>
__device__ inline float sum_of_squares(const float (&values)[kSteps][kWidth]) {
  float squares = 0.0f;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    for (int i = 0; i < kWidth; ++i) squares += values[step][i] * values[step][i];
  }
  return squares;
}

inline int32_t check_columns(const char* name, int32_t num_columns, bool is_wide) {
  const int most = kSteps * kMaxThreads * (is_wide ? 4 : 1);
  if (num_columns >= 1 && num_columns <= most) return kOk;
  return fail(std::string(name) + ": " + std::to_string(num_columns) + " columns, 1 to " +
              std::to_string(most) + " can be had");
}

inline int threads_of_row(int32_t num_columns, bool is_wide) {
  const int vectors = is_wide ? num_columns / 4 : num_columns;
  return round_up(ceil_div(vectors, kSteps), kWarpSize);
}

}  // namespace lmi::cuda
