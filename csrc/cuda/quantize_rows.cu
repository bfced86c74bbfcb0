// Rows quantised each on its own.
#include "cuda/row_codes.cuh"

namespace lmi::cuda {
namespace {

constexpr int kThreads = 256;

template <typename T, typename Code, int kWidth>
__global__ void __launch_bounds__(kThreads) quantize_rows_kernel(const LmiQuantizeRows args) {
  wait_for_earlier_kernels();
  const T* row = static_cast<const T*>(args.x) + int64_t{blockIdx.x} * args.num_columns;
  const int first = static_cast<int>(threadIdx.x) * kWidth;
  Magnitude magnitude;
  for (int column = first; column < args.num_columns; column += kThreads * kWidth) {
    magnitude.add(load_vector<T, kWidth>(row + column));
  }
  const auto visit = [&](const auto& action) {
    for (int column = first; column < args.num_columns; column += kThreads * kWidth) {
      action(column, load_vector<T, kWidth>(row + column));
    }
  };
  const RowCodes<Code> codes(args, magnitude, visit);
  codes.template finish<kWidth>(args.num_columns, args.stride);
}

}  // namespace
}  // namespace lmi::cuda

using namespace lmi::cuda;

int32_t lmi_cuda_quantize_rows(const LmiQuantizeRows* args, void* stream) {
  return with_dtype("quantize_rows", args->dtype, [&](auto element) {
    return with_row_codes("quantize_rows", *args, [&](auto code) {
      using T = decltype(element);
      using Code = decltype(code);
      const bool is_vector = reinterpret_cast<uintptr_t>(args->x) % (4 * sizeof(T)) == 0;
      const auto kernel = is_vector && args->num_columns % 4 == 0
                              ? quantize_rows_kernel<T, Code, 4>
                              : quantize_rows_kernel<T, Code, 1>;
      return launch("quantize_rows", kernel, {args->num_rows}, kThreads, 0, stream, *args);
    });
  });
}
