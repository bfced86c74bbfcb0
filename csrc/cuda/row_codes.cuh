// Rows quantised each on its own by the block that has them, int8 as the CPU does it:
// csrc/cpu/isa/quantize.inc.
#pragma once

#include "cuda/launch.cuh"

namespace lmi::cuda {

constexpr float kLeastMagnitude = 0x1p-100f;  // below it, inputs count as zeros

constexpr int kMaxWarps = 32;

// Of kernels that give no codes.
struct NoCode {};

// A low digit of int8, beside a list of those high ones that aren't 0.
struct digit {
  uint8_t bits;
};

template <typename Code>
constexpr float kMost = 127.0f;
template <>
constexpr float kMost<digit> = 256.0f * 127.0f;
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

  // Of the block's whole row: its largest magnitude, 0 if that is next to it; NaN if not all is
  // finite. For all threads at once, once in a kernel.
  __device__ float largest() const {
    __shared__ float maxima[kMaxWarps];
    __shared__ float checks[kMaxWarps];
    float most = warp_max(most_);
    if (lane_id() == 0) maxima[warp_id()] = most;
    const float invalid = block_sum(check_, checks);  // whose barrier is also that of the maxima
    const int num_warps = static_cast<int>(blockDim.x) / kWarpSize;
    for (int warp = 0; warp < num_warps; ++warp) most = max_of(most, maxima[warp]);
    if (!(invalid == 0.0f)) return invalid;
    return most < kLeastMagnitude ? 0.0f : most;
  }

 private:
  float most_ = 0.0f;
  float check_ = 0.0f;
};

// What 127 stands for in a block's row with outliers, by the rule of RowRounding in
// csrc/cpu/kernels.h. visit(action) calls action(column, numbers) with this thread's vectors of the
// row. For all threads at once, once in a kernel.
template <typename Visit>
__device__ float most_but_outliers(float largest, int num_columns, const Visit& visit) {
  constexpr int kNumParts = 7;
  constexpr float kParts[kNumParts] = {0x1p-3f, 0x1p-4f, 0x1p-5f, 0x1p-6f,
                                       0x1p-7f, 0x1p-8f, 0x1p-9f};
  __shared__ int counts[kNumParts][kMaxWarps];
  __shared__ float maxima[kMaxWarps];
  int reaching[kNumParts] = {};
  visit([&](int, const auto& numbers) {
    for (const auto& number : numbers.at) {
      const float value = to_float(number);
      const float size = max_of(value, -value);
#pragma unroll
      for (int part = 0; part < kNumParts; ++part) {
        reaching[part] += size >= largest * kParts[part] ? 1 : 0;
      }
    }
  });
#pragma unroll
  for (int part = 0; part < kNumParts; ++part) {
    const int sum = warp_sum(reaching[part]);
    if (lane_id() == 0) counts[part][warp_id()] = sum;
  }
  block_barrier();
  const int num_warps = static_cast<int>(blockDim.x) / kWarpSize;
  float threshold = 0.0f;
#pragma unroll
  for (int part = 0; part < kNumParts; ++part) {
    int count = 0;
    for (int warp = 0; warp < num_warps; ++warp) count += counts[part][warp];
    if (count <= num_columns / 32) threshold = 2.0f * kParts[part] * largest;
  }
  if (threshold == 0.0f) return largest;
  float below = 0.0f;
  visit([&](int, const auto& numbers) {
    for (const auto& number : numbers.at) {
      const float value = to_float(number);
      const float size = max_of(value, -value);
      if (size < threshold) below = max_of(below, size);
    }
  });
  below = warp_max(below);
  if (lane_id() == 0) maxima[warp_id()] = below;
  block_barrier();
  for (int warp = 0; warp < num_warps; ++warp) below = max_of(below, maxima[warp]);
  return max_of(below, 2.0f * kParts[kNumParts - 1] * largest);
}

// The place of a block's row among codes [rows, stride], scales and outliers, by a kernel's
// arguments.
template <typename Code>
class RowCodes {
 public:
  static constexpr bool kHasOutliers = std::is_same_v<Code, digit>;

  // Of the row with that magnitude, whose vectors visit() has; also stores the scale. For all
  // threads at once.
  template <typename Args, typename Visit>
  __device__ RowCodes(const Args& args, const Magnitude& magnitude, const Visit& visit)
      : codes_(args.codes + int64_t{blockIdx.x} * args.stride) {
    if constexpr (kHasOutliers) {
      __shared__ int num_outliers;
      if (threadIdx.x == 0) num_outliers = 0;
      num_outliers_ = &num_outliers;
      outliers_ = args.outliers + int64_t{blockIdx.x} * args.outlier_stride;
    }
    const float largest = magnitude.largest();
    float scale = largest / (kHasOutliers ? 127.0f : kMost<Code>);
    if constexpr (kHasOutliers) {
      if (largest > 0.0f) scale = most_but_outliers(largest, args.num_columns, visit) / 127.0f;
    }
    if constexpr (std::is_same_v<Code, e4m3>) {
      if (largest > 0.0f && args.fixed_scale > 0.0f) scale = args.fixed_scale;
    }
    if (threadIdx.x == 0) args.scales[blockIdx.x] = scale;
    if (scale > 0.0f) inverse_ = 1.0f / scale;
    visit([this](int column, const auto& numbers) { store(column, numbers); });
  }

  // Zeros from a multiple of kWidth on, after everything else.
  template <int kWidth>
  __device__ void finish(int num_columns, int stride) const {
    for (int column = num_columns + static_cast<int>(threadIdx.x) * kWidth; column < stride;
         column += static_cast<int>(blockDim.x) * kWidth) {
      *reinterpret_cast<Vector<Code, kWidth>*>(codes_ + column) = {};
    }
    if constexpr (kHasOutliers) {
      block_barrier();
      if (threadIdx.x == 0) outliers_[0] = *num_outliers_;
    }
  }

 private:
  // The codes of numbers in columns from `column` on, a multiple of kWidth.
  template <typename T, int kWidth>
  __device__ void store(int column, const Vector<T, kWidth>& values) const {
    Vector<Code, kWidth> result = {};
    if (inverse_ > 0.0f) {
      for (int i = 0; i < kWidth; ++i) {
        const float value = to_float(values.at[i]) * inverse_;
        const float bounded = max_of(-kMost<Code>, -max_of(-kMost<Code>, -value));
        if constexpr (kHasOutliers) {
          result.at[i] = low_digit(column + i, bounded);
        } else {
          result.at[i] = from_float<Code>(bounded);
        }
      }
    }
    *reinterpret_cast<Vector<Code, kWidth>*>(codes_ + column) = result;
  }

  // Of a number over the scale; the high one goes to the list.
  __device__ digit low_digit(int column, float value) const {
    constexpr float kShift = 0x1.8p23f;  // to the nearest whole number, ties to even
    const int whole = static_cast<int>((value + kShift) - kShift);
    const int high = (whole + 128) >> 8;
    if (high != 0) outliers_[1 + atomic_add(num_outliers_, 1)] = column << 8 | (high & 0xff);
    return {static_cast<uint8_t>(whole & 0xff)};
  }

  uint8_t* codes_;
  int32_t* outliers_ = nullptr;
  int* num_outliers_ = nullptr;  // shared
  float inverse_ = 0.0f;         // 0: of a row whose codes are 0
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
  if (args.outliers != nullptr) {
    if (args.code_type != LMI_I8 || args.outlier_stride <= args.num_columns / 32) {
      return fail(std::string(name) + ": lists of " + std::to_string(args.outlier_stride - 1) +
                  " outliers for code type " + std::to_string(args.code_type) + "; " +
                  std::to_string(args.num_columns / 32) + " of int8 can be had");
    }
    return action(digit{});
  }
  if (args.code_type == LMI_I8) return action(i8{});
  if (args.code_type == LMI_E4M3) return action(e4m3{});
  return fail(std::string(name) + ": code type " + std::to_string(args.code_type) +
              "; 3 (int8) and 6 (e4m3) can be had");
}

}  // namespace lmi::cuda
