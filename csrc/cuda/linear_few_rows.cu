// Matrix products for up to 8 rows: bound by reading the weight once.
//
// 16 outputs and the rows are the two sides of the tensor cores' products. K is dealt out to the
// warps of a block; since both operands may take K in any common order, a thread reads 16
// neighbouring bytes of a row and they are its part of two products. It copies them into shared
// memory a few steps ahead and reads its own only, so that nothing is waited for but the memory.
#include "cuda/fragment.h"
#include "cuda/head_linear.cuh"
#include "cuda/launch.cuh"
#include "cuda/linear_experts.cuh"
#include "cuda/lora_add.cuh"

namespace lmi::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kOutputs = 16;
constexpr int kRows = LMI_MAX_FEW_ROWS;
constexpr int kStepInputs = 32;  // two products
constexpr int kStages = 4;
constexpr int kOperands = 3;  // of a step: two groups of eight outputs, and the rows
constexpr int kStageWords = kWarps * kOperands * kWarpSize;
constexpr int kSharedBytes = kStages * kStageWords * static_cast<int>(sizeof(Word4));

// What the block's first steps will read of its outputs; no kernel writes weights.
template <typename T, typename Args>
__device__ void prefetch_weight(const Args& args) {
  constexpr int kOutputThreads = kWarps * kWarpSize / kOutputs;
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t output = int64_t{blockIdx.x} * kOutputs + thread / kOutputThreads;
  const int64_t input = thread % kOutputThreads * (kPrefetchBytes / int64_t{sizeof(T)});
  if (output >= args.num_outputs || input >= args.num_inputs) return;
  prefetch(static_cast<const T*>(args.weight) + output * args.num_inputs + input);
}

// Between rows of the weight, and of x.
template <typename Args>
__device__ int64_t input_stride(const Args& args) {
  return args.num_inputs;
}

// kHasOwnRows: where rows lie, the arguments say.
template <typename T, typename Y, bool kHasOwnRows, typename Args>
__device__ void multiply_few_rows(const Args& args) {
  const int64_t num_inputs = args.num_inputs;
  const int64_t stride = input_stride(args);
  const int first_output = static_cast<int>(blockIdx.x) * kOutputs;
  const int group = fragment_group(lane_id());
  const T* low = static_cast<const T*>(args.weight) + (first_output + group) * stride;
  const T* high = low + 8 * stride;
  const bool is_row = group < args.num_rows;
  const int row = is_row ? source_row<kHasOwnRows>(args, group) : 0;
  const T* x = static_cast<const T*>(args.x) + row * stride;
  const bool is_low = first_output + group < args.num_outputs;
  const bool is_high = first_output + group + 8 < args.num_outputs;

  Word4* stages =
      reinterpret_cast<Word4*>(shared_memory()) + warp_id() * kOperands * kWarpSize + lane_id();
  constexpr int kTurnInputs = kWarps * kStepInputs;
  const int own_input = warp_id() * kStepInputs + lane_id() % 4 * 8;
  const auto start_copies = [&](int turn) {
    const int input = own_input + turn * kTurnInputs;
    const bool is_there = input < num_inputs;
    Word4* target = stages + turn % kStages * kStageWords;
    copy_async(target, low + input, is_low && is_there);
    copy_async(target + kWarpSize, high + input, is_high && is_there);
    copy_async(target + 2 * kWarpSize, x + input, is_row && is_there);
    end_copy_group();
  };
  float sums[4] = {};
  for (int turn = 0; turn < kStages - 1; ++turn) start_copies(turn);
  const int num_turns = static_cast<int>(ceil_div(num_inputs, int64_t{kTurnInputs}));
#pragma unroll kStages
  for (int turn = 0; turn < num_turns; ++turn) {
    start_copies(turn + kStages - 1);
    wait_for_copies<kStages - 1>();
    const Word4* source = stages + turn % kStages * kStageWords;
    const Word4 a = source[0];
    const Word4 b = source[kWarpSize];
    const Word4 own = source[2 * kWarpSize];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t weights[4] = {a.at[2 * half], b.at[2 * half], a.at[2 * half + 1],
                                   b.at[2 * half + 1]};
      multiply_add<T>(sums, weights, own.at[2 * half], own.at[2 * half + 1]);
    }
  }
  wait_for_copies<0>();
  block_barrier();  // every warp is done with its operands
  // Of neighbouring rows.
  using Partials = Vector<float, 2>[kOutputs][kRows / 2];
  auto* partials = reinterpret_cast<Partials*>(shared_memory());
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
    int64_t y_stride = args.num_outputs;
    if constexpr (kHasOwnRows) y_stride = args.y_stride;
    const int64_t at = (2 * pair + i) * y_stride + first_output + output;
    static_cast<Y*>(args.y)[at] = from_float<Y>(totals[i]);
  }
}

template <typename T, typename Y>
__global__ void __launch_bounds__(kWarps* kWarpSize) linear_few_rows_kernel(const LmiLinear args) {
  prefetch_weight<T>(args);
  wait_for_earlier_kernels();
  multiply_few_rows<T, Y, false>(args);
}

template <typename T>
__global__ void __launch_bounds__(kWarps* kWarpSize)
    few_expert_rows_kernel(const LmiLinearExperts args) {
  wait_for_earlier_kernels();
  ExpertProduct own(args);
  if (!take_expert_tile<kRows>(own, static_cast<int>(blockIdx.y))) return;
  prefetch_weight<T>(own);
  multiply_few_rows<T, float, true>(own);
}

template <typename T, typename Y>
__global__ void __launch_bounds__(kWarps* kWarpSize)
    few_head_rows_kernel(const LmiHeadLinear args) {
  wait_for_earlier_kernels();
  const auto own = head_product<T, Y>(args, static_cast<int>(blockIdx.y));
  prefetch_weight<T>(own);
  multiply_few_rows<T, Y, true>(own);
}

template <typename T>
__global__ void __launch_bounds__(kWarps* kWarpSize) lora_few_rows_kernel(const LmiLoraAdd args) {
  wait_for_earlier_kernels();
  const LmiLoraTile tile = args.tiles[blockIdx.z];
  if (tile.num_rows == 0) return;
  const int number = static_cast<int>(blockIdx.y) % LMI_MAX_LORA_PARTS;
  const int split = static_cast<int>(blockIdx.y) / LMI_MAX_LORA_PARTS;
  const LmiLoraPart part = reinterpret_cast<const LmiLoraPart*>(
      tile.parts)[int64_t{args.linear_id} * LMI_MAX_LORA_PARTS + number];
  if (static_cast<int>(blockIdx.x) * kOutputs >= part.rank) return;
  const int first_input = split * LMI_LORA_SPLIT_INPUTS;
  LoraProduct own = {};
  own.stride = args.num_inputs;
  own.x = static_cast<const T*>(args.x) + int64_t{tile.first_row} * args.num_inputs + first_input;
  own.weight = reinterpret_cast<const T*>(part.a) + first_input;
  own.num_rows = tile.num_rows;
  own.num_outputs = part.rank;
  own.num_inputs = lower_of(args.num_inputs - first_input, LMI_LORA_SPLIT_INPUTS);
  const int split_values = LMI_MAX_LORA_PARTS * args.max_rank;
  own.y_stride = lora_splits(args.num_inputs) * split_values;
  own.y = args.partials + int64_t{tile.first_row} * own.y_stride + split * split_values +
          number * args.max_rank;
  multiply_few_rows<T, float, true>(own);
}

}  // namespace

int32_t launch_lora_few_rows(const LmiLoraAdd& args, void* stream) {
  const Grid grid = {ceil_div(args.max_rank, kOutputs),
                     int64_t{lora_splits(args.num_inputs)} * LMI_MAX_LORA_PARTS, args.num_tiles};
  return launch("lora_add", lora_few_rows_kernel<bf16>, grid, kWarps * kWarpSize, kSharedBytes,
                stream, args);
}

int32_t launch_few_expert_rows(const LmiLinearExperts& args, void* stream) {
  const Grid grid = {ceil_div(args.num_outputs, kOutputs),
                     most_expert_tiles(args.num_rows, args.num_experts, kRows)};
  return launch("linear_experts", few_expert_rows_kernel<bf16>, grid, kWarps * kWarpSize,
                kSharedBytes, stream, args);
}

int32_t launch_few_head_rows(const LmiHeadLinear& args, void* stream) {
  const Grid grid = {ceil_div(args.num_outputs, kOutputs), args.num_heads};
  return with_dtype("head_linear", args.y_dtype, [&](auto element) {
    return launch("head_linear", few_head_rows_kernel<bf16, decltype(element)>, grid,
                  kWarps * kWarpSize, kSharedBytes, stream, args);
  });
}

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
  if (const int32_t status = check_bf16("linear_few_rows", args->dtype)) return status;
  return with_dtype("linear_few_rows", args->y_dtype, [&](auto element) {
    const auto kernel = linear_few_rows_kernel<bf16, decltype(element)>;
    return launch("linear_few_rows", kernel, grid, kWarps * kWarpSize, kSharedBytes, stream, *args);
  });
}
