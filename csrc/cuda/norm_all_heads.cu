// RMS norms over all heads of queries, and over all of keys, of which a rank has some: its part of
// the means of squares, which ranks add up by all_reduce, and what they make of the rows. Bound by
// memory, and by the meeting between the two.
//
// The order of additions depends on the numbers of columns only.
#include "cuda/launch.cuh"

namespace lmi::cuda {
namespace {

constexpr int kThreads = 256;

// One block per row and norm: blockIdx.y is 0 for queries, 1 for keys.
__global__ void __launch_bounds__(kThreads) square_heads_kernel(const LmiSquareHeads args) {
  wait_for_earlier_kernels();
  __shared__ float partials[kThreads / kWarpSize];
  const bool is_keys = blockIdx.y == 1;
  const int num_columns = is_keys ? args.num_k : args.num_q;
  const float* row =
      args.x + static_cast<int64_t>(blockIdx.x) * args.stride + (is_keys ? args.num_q : 0);
  float sum = 0.0f;
  for (int i = static_cast<int>(threadIdx.x); i < num_columns; i += kThreads)
    sum += row[i] * row[i];
  const float total = block_sum(sum, partials);
  if (threadIdx.x != 0) return;
  const int64_t target = int64_t{2} * blockIdx.x + blockIdx.y;
  args.means[target] =
      total / (static_cast<float>(num_columns) * static_cast<float>(args.num_ranks));
}

__global__ void __launch_bounds__(kThreads) scale_heads_kernel(const LmiScaleHeads args) {
  wait_for_earlier_kernels();
  const int column = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x);
  if (column >= args.num_q + args.num_k) return;
  const float mean = args.means[int64_t{2} * blockIdx.x + (column < args.num_q ? 0 : 1)];
  const float scale = inverse_sqrt(mean + args.eps);
  args.x[static_cast<int64_t>(blockIdx.x) * args.stride + column] *= scale * args.weight[column];
}

}  // namespace
}  // namespace lmi::cuda

using namespace lmi::cuda;

int32_t lmi_cuda_square_heads(const LmiSquareHeads* args, void* stream) {
  return launch("square_heads", square_heads_kernel, {args->num_rows, 2}, kThreads, 0, stream,
                *args);
}

int32_t lmi_cuda_scale_heads(const LmiScaleHeads* args, void* stream) {
  return launch("scale_heads", scale_heads_kernel,
                {args->num_rows, ceil_div(args->num_q + args->num_k, kThreads)}, kThreads, 0,
                stream, *args);
}
