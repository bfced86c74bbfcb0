// Rows quantised each on its own, int8 as the CPU does it: csrc/cpu/isa/quantize.inc.
#include "cuda/launch.cuh"

namespace lmi::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr float kLeastMagnitude = 0x1p-100f;  // below it, inputs count as zeros

template <typename Code>
constexpr float kMost = 127.0f;
template <>
constexpr float kMost<e4m3> = 448.0f;

template <typename T, int kWidth>
__device__ Vector<T, kWidth> load_vector(const T* row, int column) {
  return *reinterpret_cast<const Vector<T, kWidth>*>(row + column);
}

// The scale that maps the row's largest magnitude to the largest code; NaN if not all is finite.
template <typename T, typename Code, int kWidth>
__device__ float find_scale(const T* row, int num_columns) {
  __shared__ float maxima[kWarps];
  __shared__ float checks[kWarps];
  float most = 0.0f;
  float check = 0.0f;
  for (int column = static_cast<int>(threadIdx.x) * kWidth; column < num_columns;
       column += kThreads * kWidth) {
    const auto values = load_vector<T, kWidth>(row, column);
    for (int i = 0; i < kWidth; ++i) {
      const float value = to_float(values.at[i]);
      most = max_of(most, max_of(value, -value));
      check += value * 0.0f;
    }
  }
  most = warp_max(most);
  if (lane_id() == 0) maxima[warp_id()] = most;
  const float invalid = block_sum(check, checks);  // whose barrier is also that of the maxima
  for (int warp = 0; warp < kWarps; ++warp) most = max_of(most, maxima[warp]);
  if (!(invalid == 0.0f)) return invalid;
  return most < kLeastMagnitude ? 0.0f : most / kMost<Code>;
}

template <typename T, typename Code, int kWidth>
__global__ void __launch_bounds__(kThreads) quantize_rows_kernel(const LmiQuantizeRows args) {
  const T* row = static_cast<const T*>(args.x) + int64_t{blockIdx.x} * args.num_columns;
  uint8_t* codes = args.codes + int64_t{blockIdx.x} * args.stride;
  const float scale = find_scale<T, Code, kWidth>(row, args.num_columns);
  if (threadIdx.x == 0) args.scales[blockIdx.x] = scale;
  const bool is_usable = scale > 0.0f;
  const float inverse = is_usable ? 1.0f / scale : 0.0f;
  for (int column = static_cast<int>(threadIdx.x) * kWidth; column < args.stride;
       column += kThreads * kWidth) {
    Vector<Code, kWidth> result = {};
    if (is_usable && column < args.num_columns) {
      const auto values = load_vector<T, kWidth>(row, column);
      for (int i = 0; i < kWidth; ++i) {
        const float value = to_float(values.at[i]) * inverse;
        result.at[i] = from_float<Code>(max_of(-kMost<Code>, -max_of(-kMost<Code>, -value)));
      }
    }
    *reinterpret_cast<Vector<Code, kWidth>*>(codes + column) = result;
  }
}

}  // namespace
}  // namespace lmi::cuda

using namespace lmi::cuda;

int32_t lmi_cuda_quantize_rows(const LmiQuantizeRows* args, void* stream) {
  if (args->stride % LMI_CODE_STRIDE != 0 || args->stride < args->num_columns) {
    return fail("quantize_rows: rows of " + std::to_string(args->stride) + " codes for " +
                std::to_string(args->num_columns) + " columns; multiples of " +
                std::to_string(LMI_CODE_STRIDE) + " that hold them can be had");
  }
  if (!is_aligned(args->codes)) return fail("quantize_rows: the codes must start on 16 bytes");
  const auto with_types = [&](auto element, auto code) {
    using T = decltype(element);
    using Code = decltype(code);
    const auto run = [&](auto kernel) {
      return launch("quantize_rows", kernel, {args->num_rows}, kThreads, 0, stream, *args);
    };
    const bool is_vector = reinterpret_cast<uintptr_t>(args->x) % (4 * sizeof(T)) == 0;
    if (is_vector && args->num_columns % 4 == 0) return run(quantize_rows_kernel<T, Code, 4>);
    return run(quantize_rows_kernel<T, Code, 1>);
  };
  return with_dtype("quantize_rows", args->dtype, [&](auto element) {
    if (args->code_type == LMI_I8) return with_types(element, i8{});
    if (args->code_type == LMI_E4M3) return with_types(element, e4m3{});
    return fail("quantize_rows: code type " + std::to_string(args->code_type) +
                "; 3 (int8) and 6 (e4m3) can be had");
  });
}
