// Rows quantised each on its own by the block that has them, int8 as the CPU does it:
// csrc/cpu/isa/quantize.inc.
#pragma once

#include "cuda/launch.cuh"

namespace lmi::cuda {

constexpr float kLeastMagnitude = 0x1p-100f;  // below it, inputs count as zeros

// Of kernels that give no codes.
struct NoCode {};

template <typename Code>
constexpr float kMost = 127.0f;
template <>
constexpr float kMost<e4m3> = 448.0f;

// What a thread has seen of its block's row.
class Magnitude {
 public:
  template <typename T, int kWidth>
  __device__ void add(const Vector<T, kWidth>& values) {
    for (int i = 0; i < kWidth; ++i) {
      const float value = to_float(values.at[i]);
      most_ = max_of(most_, max_of(value, -value));
      check_ += value * 0.0f;
    }
  }

  // Of the block's whole row: the scale that maps its largest magnitude to the largest code; NaN if
  // not all is finite. For all threads at once, once in a kernel.
  template <typename Code>
  __device__ float scale() const {
    constexpr int kMaxWarps = 32;
    __shared__ float maxima[kMaxWarps];
    __shared__ float checks[kMaxWarps];
    float most = warp_max(most_);
    if (lane_id() == 0) maxima[warp_id()] = most;
    const float invalid = block_sum(check_, checks);  // whose barrier is also that of the maxima
    const int num_warps = static_cast<int>(blockDim.x) / kWarpSize;
    for (int warp = 0; warp < num_warps; ++warp) most = max_of(most, maxima[warp]);
    if (!(invalid == 0.0f)) return invalid;
    return most < kLeastMagnitude ? 0.0f : most / kMost<Code>;
  }

 private:
  float most_ = 0.0f;
  float check_ = 0.0f;
};

// The place of a block's row among codes [rows, stride] and scales, by a kernel's arguments.
template <typename Code>
class RowCodes {
 public:
  // Of the row with that magnitude; also stores the scale. For all threads at once.
  template <typename Args>
  __device__ RowCodes(const Args& args, const Magnitude& magnitude)
      : codes_(args.codes + int64_t{blockIdx.x} * args.stride) {
    const float scale = magnitude.scale<Code>();
    if (threadIdx.x == 0) args.scales[blockIdx.x] = scale;
    if (scale > 0.0f) inverse_ = 1.0f / scale;
  }

  // The codes of numbers in columns from `column` on, a multiple of kWidth.
  template <typename T, int kWidth>
  __device__ void store(int column, const Vector<T, kWidth>& values) const {
    Vector<Code, kWidth> result = {};
    if (inverse_ > 0.0f) {
      for (int i = 0; i < kWidth; ++i) {
        const float value = to_float(values.at[i]) * inverse_;
        result.at[i] = from_float<Code>(max_of(-kMost<Code>, -max_of(-kMost<Code>, -value)));
      }
    }
    *reinterpret_cast<Vector<Code, kWidth>*>(codes_ + column) = result;
  }

  // Zeros from a multiple of kWidth on.
  template <int kWidth>
  __device__ void pad(int num_columns, int stride) const {
    for (int column = num_columns + static_cast<int>(threadIdx.x) * kWidth; column < stride;
         column += static_cast<int>(blockDim.x) * kWidth) {
      *reinterpret_cast<Vector<Code, kWidth>*>(codes_ + column) = {};
    }
  }

 private:
  uint8_t* codes_;
  float inverse_ = 0.0f;  // 0: of a row whose codes are 0
};

template <typename T, int kWidth>
__device__ inline Vector<T, kWidth> load_vector(const T* source) {
  return *reinterpret_cast<const Vector<T, kWidth>*>(source);
}

template <typename T, int kWidth>
__device__ inline void store_vector(T* target, const Vector<T, kWidth>& values) {
  *reinterpret_cast<Vector<T, kWidth>*>(target) = values;
}

template <typename T, int kWidth>
__device__ inline Vector<T, kWidth> rounded(const float (&values)[kWidth]) {
  Vector<T, kWidth> vector;
  for (int i = 0; i < kWidth; ++i) vector.at[i] = from_float<T>(values[i]);
  return vector;
}

// Calls action(Code{}) with the type of codes that a kernel's arguments ask for.
template <typename Args, typename Action>
int32_t with_row_codes(const char* name, const Args& args, const Action& action) {
  if (args.stride % LMI_CODE_STRIDE != 0 || args.stride < args.num_columns) {
    return fail(std::string(name) + ": rows of " + std::to_string(args.stride) + " codes for " +
                std::to_string(args.num_columns) + " columns; multiples of " +
                std::to_string(LMI_CODE_STRIDE) + " that hold them can be had");
  }
  if (!is_aligned(args.codes)) {
    return fail(std::string(name) + ": the codes must start on 16 bytes");
  }
  if (args.code_type == LMI_I8) return action(i8{});
  if (args.code_type == LMI_E4M3) return action(e4m3{});
  return fail(std::string(name) + ": code type " + std::to_string(args.code_type) +
              "; 3 (int8) and 6 (e4m3) can be had");
}

}  // namespace lmi::cuda
