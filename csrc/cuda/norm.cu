// Norms of rows, or of groups of their columns, that rms_norm.cu has not: with a mean, a bias,
// without a weight, or a sum alone. One block per group, whose values stay in registers: bound by
// memory.
//
// The order of additions depends on num_columns only.
#include "cuda/norm_rows.cuh"

namespace lmi::cuda {
namespace {

// Of a row that is padded with zeros, which stay that.
template <int kWidth>
__device__ inline void subtract_mean(int num_columns, float* partials,
                                     float (&values)[kSteps][kWidth]) {
  float sum = 0.0f;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    for (int i = 0; i < kWidth; ++i) sum += values[step][i];
  }
  const float mean = block_sum(sum, partials) / static_cast<float>(num_columns);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if (column_of<kWidth>(step) >= num_columns) continue;
    for (int i = 0; i < kWidth; ++i) values[step][i] -= mean;
  }
}

// A weight is loaded before anything that waits for the row, a bias, which few have, after it.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kMaxThreads) norm_kernel(const LmiNorm args) {
  wait_for_earlier_kernels();
  __shared__ float sums[kMaxThreads / kWarpSize];
  __shared__ float squares[kMaxThreads / kWarpSize];
  const int in_weight = static_cast<int>(blockIdx.y) * args.num_columns;
  const int64_t start =
      static_cast<int64_t>(blockIdx.x) * args.stride + args.first_column + in_weight;
  float kept[kSteps][kWidth] = {};
  float weight[kSteps][kWidth];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    for (int i = 0; i < kWidth; ++i) weight[step][i] = 1.0f;
  }
  load_row(args.x + start, args.num_columns, kept);
  if (args.weight != nullptr) load_row(args.weight + in_weight, args.num_columns, weight);
  if (args.addend != nullptr)
    add_to_row(args.addend + start, args.num_columns, args.x + start, kept);
  if (args.kind == LMI_NORM_LAYER) subtract_mean(args.num_columns, sums, kept);
  float scale = 1.0f;
  if (args.kind != LMI_NORM_NONE) {
    const float mean =
        block_sum(sum_of_squares(kept), squares) / static_cast<float>(args.num_columns);
    scale = inverse_sqrt(mean + args.eps);
  }
  if (args.y == nullptr) return;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int column = column_of<kWidth>(step);
    if (column >= args.num_columns) continue;
    // Nothing fused: every instance of the kernel shall round alike.
    for (int i = 0; i < kWidth; ++i) {
      kept[step][i] = product_of(kept[step][i], scale * weight[step][i]);
    }
    if (args.bias != nullptr) {
      float bias[kWidth];
      load_floats(args.bias + in_weight + column, bias);
      for (int i = 0; i < kWidth; ++i) kept[step][i] += bias[i];
    }
    store_as(static_cast<T*>(args.y) + start + column, kept[step]);
  }
}

}  // namespace
}  // namespace lmi::cuda

using namespace lmi::cuda;

int32_t lmi_cuda_norm(const LmiNorm* args, void* stream) {
  if (args->kind < LMI_NORM_NONE || args->kind > LMI_NORM_LAYER) {
    return fail("norm: kind " + std::to_string(args->kind) +
                "; known are 0 (none), 1 (rms), 2 (layer)");
  }
  const bool is_wide = args->num_columns % 4 == 0 && args->stride % 4 == 0 &&
                       args->first_column % 4 == 0 && is_aligned(args->x) && is_aligned(args->y) &&
                       is_aligned(args->addend) && is_aligned(args->weight) &&
                       is_aligned(args->bias);
  if (const int32_t status = check_columns("norm", args->num_columns, is_wide)) return status;
  const int num_threads = threads_of_row(args->num_columns, is_wide);
  return with_dtype("norm", args->y_dtype, [&](auto element) {
    using T = decltype(element);
    const auto kernel = is_wide ? norm_kernel<T, 4> : norm_kernel<T, 1>;
    return launch("norm", kernel, {args->num_rows, args->num_groups}, num_threads, 0, stream,
                  *args);
  });
}
