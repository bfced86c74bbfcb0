// RMS norm with a residual added on the way, and with its results quantised: one block per row,
// bound by memory.
//
// A row's values stay in registers between the sum of squares and the scaling, and between that and
// their codes, so that x is read once. The order of additions depends on num_columns only.
#include "cuda/norm_rows.cuh"
#include "cuda/row_codes.cuh"

namespace lmi::cuda {
namespace {

// Loads come before anything that waits for one of them, so that a row takes one latency.
template <typename T, int kWidth, typename Code>
__global__ void __launch_bounds__(kMaxThreads) rms_norm_kernel(const LmiRmsNorm args) {
  wait_for_earlier_kernels();
  constexpr bool kIsCoded = !std::is_same_v<Code, NoCode>;
  __shared__ float partials[kMaxThreads / kWarpSize];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * args.num_columns;
  float kept[kSteps][kWidth] = {};
  float weight[kSteps][kWidth] = {};
  load_row(args.x + first, args.num_columns, kept);
  if (args.addend != nullptr)
    add_to_row(args.addend + first, args.num_columns, args.x + first, kept);
  load_row(args.weight, args.num_columns, weight);
  const float squares = sum_of_squares(kept);
  const float mean = block_sum(squares, partials) / static_cast<float>(args.num_columns);
  const float scale = inverse_sqrt(mean + args.eps);
  Vector<T, kWidth> results[kSteps];
  Magnitude magnitude;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int column = column_of<kWidth>(step);
    for (int i = 0; i < kWidth; ++i) kept[step][i] *= scale * weight[step][i];
    results[step] = rounded<T>(kept[step]);
    if constexpr (kIsCoded) magnitude.add(results[step]);
    if (column < args.num_columns && (!kIsCoded || args.y != nullptr)) {
      store_vector(static_cast<T*>(args.y) + first + column, results[step]);
    }
  }
  if constexpr (kIsCoded) {
    const auto visit = [&](const auto& action) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int column = column_of<kWidth>(step);
        if (column < args.num_columns) action(column, results[step]);
      }
    };
    const RowCodes<Code> codes(args, magnitude, visit);
    codes.template finish<kWidth>(args.num_columns, args.stride);
  }
}

}  // namespace
}  // namespace lmi::cuda

using namespace lmi::cuda;

int32_t lmi_cuda_rms_norm(const LmiRmsNorm* args, void* stream) {
  const bool is_wide = args->num_columns % 4 == 0 && is_aligned(args->x) && is_aligned(args->y) &&
                       is_aligned(args->addend) && is_aligned(args->weight);
  if (const int32_t status = check_columns("rms_norm", args->num_columns, is_wide)) return status;
  const int num_threads = threads_of_row(args->num_columns, is_wide);
  return with_dtype("rms_norm", args->y_dtype, [&](auto element) {
    const auto run = [&](auto code) {
      using T = decltype(element);
      using Code = decltype(code);
      const auto kernel = is_wide ? rms_norm_kernel<T, 4, Code> : rms_norm_kernel<T, 1, Code>;
      return launch("rms_norm", kernel, {args->num_rows}, num_threads, 0, stream, *args);
    };
    return args->codes == nullptr ? run(NoCode{}) : with_row_codes("rms_norm", *args, run);
  });
}
