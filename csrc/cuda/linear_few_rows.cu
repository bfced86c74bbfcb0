// Matrix products for up to 8 rows: bound by reading the weight once.
//
// 16 outputs and the rows are the two sides of the tensor cores' products. K is dealt out to the
// warps of a block; since both operands may take K in any common order, a thread reads 16
// neighbouring bytes of a row and they are its part of two products, without shared memory.
#include "cuda/fragment.h"
#include "cuda/launch.cuh"

namespace lmi::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kOutputs = 16;
constexpr int kRows = LMI_MAX_FEW_ROWS;
constexpr int kStepInputs = 32;  // two products
constexpr int kUnroll = 4;

template <typename T>
__device__ Word4 load_words(const T* source, bool is_there) {
  if (!is_there) return {};
  return *reinterpret_cast<const Word4*>(source);
}

// What the block's first steps will read of its outputs; no kernel writes weights.
template <typename T>
__device__ void prefetch_weight(const LmiLinear& args) {
  constexpr int kOutputThreads = kWarps * kWarpSize / kOutputs;
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t output = int64_t{blockIdx.x} * kOutputs + thread / kOutputThreads;
  const int64_t input = thread % kOutputThreads * (kPrefetchBytes / int64_t{sizeof(T)});
  if (output >= args.num_outputs || input >= args.num_inputs) return;
  prefetch(static_cast<const T*>(args.weight) + output * args.num_inputs + input);
}

template <typename T>
__global__ void __launch_bounds__(kWarps* kWarpSize) linear_few_rows_kernel(const LmiLinear args) {
  prefetch_weight<T>(args);
  wait_for_earlier_kernels();
  __shared__ Vector<float, 2> partials[kWarps][kOutputs][kRows / 2];  // of neighbouring rows
  const int64_t num_inputs = args.num_inputs;
  const int first_output = static_cast<int>(blockIdx.x) * kOutputs;
  const int group = fragment_group(lane_id());
  const T* low = static_cast<const T*>(args.weight) + (first_output + group) * num_inputs;
  const T* high = low + 8 * num_inputs;
  const T* x = static_cast<const T*>(args.x) + group * num_inputs;
  const bool is_low = first_output + group < args.num_outputs;
  const bool is_high = first_output + group + 8 < args.num_outputs;
  const bool is_row = group < args.num_rows;

  float sums[4] = {};
#pragma unroll kUnroll
  for (int first = warp_id() * kStepInputs; first < num_inputs; first += kWarps * kStepInputs) {
    const int input = first + lane_id() % 4 * 8;
    const bool is_there = input < num_inputs;
    const Word4 a = load_words(low + input, is_low && is_there);
    const Word4 b = load_words(high + input, is_high && is_there);
    const Word4 own = load_words(x + input, is_row && is_there);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const uint32_t weights[4] = {a.at[2 * step], b.at[2 * step], a.at[2 * step + 1],
                                   b.at[2 * step + 1]};
      multiply_add<T>(sums, weights, own.at[2 * step], own.at[2 * step + 1]);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Element at = fragment_c(lane_id(), 2 * half);
    const float own[2] = {sums[2 * half], sums[2 * half + 1]};
    store_floats(partials[warp_id()][at.row][at.column / 2].at, own);
  }
  block_barrier();
  const int output = static_cast<int>(threadIdx.x) / (kRows / 2);
  const int pair = static_cast<int>(threadIdx.x) % (kRows / 2);
  if (output >= kOutputs || first_output + output >= args.num_outputs) return;
  const float bias = args.bias == nullptr ? 0.0f : args.bias[first_output + output];
  float totals[2] = {bias, bias};
  for (int warp = 0; warp < kWarps; ++warp) {
    const Vector<float, 2> own = partials[warp][output][pair];
    for (int i = 0; i < 2; ++i) totals[i] += own.at[i];
  }
  for (int i = 0; i < 2 && 2 * pair + i < args.num_rows; ++i) {
    args.y[int64_t{2 * pair + i} * args.num_outputs + first_output + output] = totals[i];
  }
}

}  // namespace
}  // namespace lmi::cuda

using namespace lmi::cuda;

int32_t lmi_cuda_linear_few_rows(const LmiLinear* args, void* stream) {
  if (args->num_rows > kRows || args->num_inputs % 8 != 0) {
    return fail("linear_few_rows: " + std::to_string(args->num_rows) + " rows of " +
                std::to_string(args->num_inputs) + " inputs; at most " + std::to_string(kRows) +
                " rows of a multiple of 8 can be had");
  }
  if (!is_aligned(args->x) || !is_aligned(args->weight)) {
    return fail("linear_few_rows: x and weight must start on 16 bytes");
  }
  const Grid grid = {ceil_div(args->num_outputs, kOutputs)};
  const auto run = [&](auto element) {
    return launch("linear_few_rows", linear_few_rows_kernel<decltype(element)>, grid,
                  kWarps * kWarpSize, 0, stream, *args);
  };
  if (args->dtype == LMI_BF16) return run(bf16{});
  if (args->dtype == LMI_F16) return run(f16{});
  return fail("linear_few_rows: element type " + std::to_string(args->dtype) +
              "; 1 (bf16) and 2 (fp16) can be had");
}
