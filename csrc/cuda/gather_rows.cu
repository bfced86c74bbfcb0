// Rows of a table by id, for embeddings, learned positions and the rows whose logits are wanted:
// bound by memory.
#include "cuda/launch.cuh"

namespace lmi::cuda {
namespace {

constexpr int kThreads = 256;

template <typename T, int kWidth>
__global__ void gather_rows_kernel(const LmiGatherRows args) {
  wait_for_earlier_kernels();
  const int64_t row = blockIdx.x;
  const int column = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x) * kWidth;
  if (column >= args.num_columns) return;
  const T* source = static_cast<const T*>(args.table) +
                    static_cast<int64_t>(args.ids[row] + args.offset) * args.num_columns + column;
  const auto vector = *reinterpret_cast<const Vector<T, kWidth>*>(source);
  float values[kWidth];
  for (int i = 0; i < kWidth; ++i) values[i] = to_float(vector.at[i]) * args.scale;
  float* target = args.y + row * args.num_columns + column;
  if (args.adds != 0) {
    float sums[kWidth];
    load_floats(target, sums);
    for (int i = 0; i < kWidth; ++i) values[i] += sums[i];
  }
  store_floats(target, values);
}

}  // namespace
}  // namespace lmi::cuda

using namespace lmi::cuda;

int32_t lmi_cuda_gather_rows(const LmiGatherRows* args, void* stream) {
  const bool is_wide = args->num_columns % 4 == 0 && is_aligned(args->table) && is_aligned(args->y);
  const Grid grid = {args->num_rows, ceil_div(args->num_columns, kThreads * (is_wide ? 4 : 1))};
  return with_dtype("gather_rows", args->table_dtype, [&](auto element) {
    using T = decltype(element);
    const auto kernel = is_wide ? gather_rows_kernel<T, 4> : gather_rows_kernel<T, 1>;
    return launch("gather_rows", kernel, grid, kThreads, 0, stream, *args);
  });
}
