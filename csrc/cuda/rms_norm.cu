// RMS norm with a residual added on the way: one block per row, bound by memory.
//
// A row's values stay in registers between the sum of squares and the scaling, so that x is read
// once. The order of additions depends on num_columns only.
#include "cuda/launch.cuh"

namespace lmi::cuda {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kSteps = 4;  // vectors that a thread keeps

template <typename T, int kWidth>
__global__ void __launch_bounds__(kMaxThreads) rms_norm_kernel(const LmiRmsNorm args) {
  __shared__ float partials[kMaxThreads / kWarpSize];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * args.num_columns;
  float kept[kSteps][kWidth];
  float squares = 0.0f;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int column = static_cast<int>(step * blockDim.x + threadIdx.x) * kWidth;
    if (column >= args.num_columns) continue;
    float* x = args.x + first + column;
    load_floats(x, kept[step]);
    if (args.addend != nullptr) {
      float addend[kWidth];
      load_floats(args.addend + first + column, addend);
      for (int i = 0; i < kWidth; ++i) kept[step][i] += addend[i];
      store_floats(x, kept[step]);
    }
    for (int i = 0; i < kWidth; ++i) squares += kept[step][i] * kept[step][i];
  }
  const float mean = block_sum(squares, partials) / static_cast<float>(args.num_columns);
  const float scale = inverse_sqrt(mean + args.eps);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int column = static_cast<int>(step * blockDim.x + threadIdx.x) * kWidth;
    if (column >= args.num_columns) continue;
    float weight[kWidth];
    load_floats(args.weight + column, weight);
    for (int i = 0; i < kWidth; ++i) kept[step][i] *= scale * weight[i];
    store_as(static_cast<T*>(args.y) + first + column, kept[step]);
  }
}

}  // namespace
}  // namespace lmi::cuda

using namespace lmi::cuda;

int32_t lmi_cuda_rms_norm(const LmiRmsNorm* args, void* stream) {
  const bool is_wide = args->num_columns % 4 == 0 && is_aligned(args->x) && is_aligned(args->y) &&
                       is_aligned(args->addend) && is_aligned(args->weight);
  const int most = kSteps * kMaxThreads * (is_wide ? 4 : 1);
  if (args->num_columns < 1 || args->num_columns > most) {
    return fail("rms_norm: " + std::to_string(args->num_columns) + " columns, 1 to " +
                std::to_string(most) + " can be had");
  }
  const int vectors = is_wide ? args->num_columns / 4 : args->num_columns;
  const int num_threads = round_up(ceil_div(vectors, kSteps), kWarpSize);
  return with_dtype("rms_norm", args->y_dtype, [&](auto element) {
    using T = decltype(element);
    const auto kernel = is_wide ? rms_norm_kernel<T, 4> : rms_norm_kernel<T, 1>;
    return launch("rms_norm", kernel, {args->num_rows}, num_threads, 0, stream, *args);
  });
}
