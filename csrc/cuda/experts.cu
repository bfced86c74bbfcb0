// Which rows experts have, and the sums of what they make of them: bound by memory, and small.
#include "cuda/expert_tile.cuh"
#include "cuda/launch.cuh"

namespace lmi::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;

// The expert of a choice; choices are those of the first token, then of the next.
__device__ int chosen_expert(const LmiGroupRows& args, int choice) {
  const int64_t token = choice / args.top_k;
  return static_cast<int>(args.routes[token * 2 * args.top_k + choice % args.top_k]);
}

// A block has an expert, whose rows lie behind those of lower ones, and its warps have a part of
// the choices each; the block after the last expert's has no rows.
__global__ void __launch_bounds__(kThreads) group_rows_kernel(const LmiGroupRows args) {
  __shared__ int num_lower_of[kWarps];
  __shared__ int num_own_of[kWarps];
  wait_for_earlier_kernels();
  const int expert = static_cast<int>(blockIdx.x);
  const int num_choices = args.num_rows * args.top_k;
  const int num_in_part = ceil_div(num_choices, kWarps);
  const int begin = warp_id() * num_in_part;
  const int end = lower_of(begin + num_in_part, num_choices);
  int num_lower = 0;
  int num_own = 0;
  for (int choice = begin + lane_id(); choice < end; choice += kWarpSize) {
    const int chosen = chosen_expert(args, choice);
    num_lower += chosen < expert;
    num_own += chosen == expert;
  }
  num_lower = warp_sum(num_lower);
  num_own = warp_sum(num_own);
  if (lane_id() == 0) {
    num_lower_of[warp_id()] = num_lower;
    num_own_of[warp_id()] = num_own;
  }
  block_barrier();
  int row = 0;
  for (int warp = 0; warp < kWarps; ++warp) row += num_lower_of[warp];
  if (threadIdx.x == 0) args.first_rows[expert] = row;
  for (int warp = 0; warp < warp_id(); ++warp) row += num_own_of[warp];
  if (num_own == 0) return;
  for (int first = begin; first < end; first += kWarpSize) {
    const int choice = first + lane_id();
    const bool is_own = choice < end && chosen_expert(args, choice) == expert;
    const int next = row + sum_up_to_lane(is_own ? 1 : 0);
    if (is_own) {
      args.token_rows[next - 1] = choice / args.top_k;
      args.places[choice] = next - 1;
    }
    row = shuffle(next, kWarpSize - 1);
  }
}

// kWidth columns of a token a thread.
template <int kWidth>
__global__ void __launch_bounds__(kThreads) add_experts_kernel(const LmiAddExperts args) {
  wait_for_earlier_kernels();
  const int column =
      (static_cast<int>(blockIdx.y) * kThreads + static_cast<int>(threadIdx.x)) * kWidth;
  if (column >= args.num_columns) return;
  const int64_t token = blockIdx.x;
  float* target = args.sums + token * args.num_columns + column;
  float totals[kWidth] = {};
  if (args.adds != 0) load_floats(target, totals);
  for (int choice = 0; choice < args.top_k; ++choice) {
    const int64_t own = token * args.top_k + choice;
    const int64_t row = args.places == nullptr ? own : args.places[own];
    const float weight = args.routes[(2 * token + 1) * args.top_k + choice];
    float values[kWidth];
    load_floats(args.y + row * args.num_columns + column, values);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) totals[i] += product_of(weight, values[i]);
  }
  store_floats(target, totals);
}

}  // namespace
}  // namespace lmi::cuda

using namespace lmi::cuda;

int32_t lmi_cuda_group_rows(const LmiGroupRows* args, void* stream) {
  return launch("group_rows", group_rows_kernel, {args->num_experts + 1}, kThreads, 0, stream,
                *args);
}

int32_t lmi_cuda_add_experts(const LmiAddExperts* args, void* stream) {
  const bool is_wide = args->num_columns % 4 == 0 && is_aligned(args->y) && is_aligned(args->sums);
  return with_bool(is_wide, [&](auto is_wide_type) {
    constexpr int kWidth = decltype(is_wide_type)::value ? 4 : 1;
    const Grid grid = {args->num_rows, ceil_div(args->num_columns, kThreads * kWidth)};
    return launch("add_experts", add_experts_kernel<kWidth>, grid, kThreads, 0, stream, *args);
  });
}
