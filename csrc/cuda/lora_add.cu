// What LoRA adapters add to a linear's results: bound by reading the adapters, of few rows each,
// and by reading and writing the results.
//
// The first product, a x, is linear_few_rows.cu's, in parts of the inputs so that many blocks read
// a at once. The second one is made here: outputs and the tile's rows are the two sides of the
// tensor cores' products. Since both operands may take the rank in any common order, a thread reads
// 8 neighbouring numbers of a row of either, which are its part of two products.
#include "cuda/lora_add.cuh"

#include "cuda/fragment.h"
#include "cuda/launch.cuh"

namespace lmi::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kOutputs = 16;  // of a product
constexpr int kProducts = 2;  // of a warp
constexpr int kWarpOutputs = kProducts * kOutputs;
constexpr int kBlockOutputs = kWarps * kWarpOutputs;
constexpr int kPieceRanks = 8;
constexpr int kStepRanks = 4 * kPieceRanks;

// A piece of a row of a x, from the parts of its inputs.
template <typename T>
__device__ Word4 sum_splits(const float* partials, int num_splits, int split_values) {
  float totals[kPieceRanks] = {};
  for (int split = 0; split < num_splits; ++split) {
    float own[kPieceRanks];
    load_floats(partials + int64_t{split} * split_values, own);
#pragma unroll
    for (int i = 0; i < kPieceRanks; ++i) totals[i] += own[i];
  }
  Word4 piece;
#pragma unroll
  for (int i = 0; i < kPieceRanks / 2; ++i) {
    piece.at[i] = pack_pair<T>(totals[2 * i], totals[2 * i + 1]);
  }
  return piece;
}

template <typename T>
__global__ void __launch_bounds__(kWarps* kWarpSize) lora_outputs_kernel(const LmiLoraAdd args) {
  wait_for_earlier_kernels();
  const LmiLoraTile tile = args.tiles[blockIdx.y];
  if (tile.num_rows == 0) return;
  const int group = fragment_group(lane_id());
  const int first_output = static_cast<int>(blockIdx.x) * kBlockOutputs + warp_id() * kWarpOutputs;
  const int num_splits = lora_splits(args.num_inputs);
  const int split_values = LMI_MAX_LORA_PARTS * args.max_rank;
  const float* partials =
      args.partials + (int64_t{tile.first_row} + group) * num_splits * split_values;
  const auto* parts = reinterpret_cast<const LmiLoraPart*>(tile.parts) +
                      int64_t{args.linear_id} * LMI_MAX_LORA_PARTS;
  float sums[kProducts][4] = {};
  for (int number = 0; number < LMI_MAX_LORA_PARTS; ++number) {
    const LmiLoraPart part = parts[number];
    const int first = first_output - part.first_output;  // of the part
    if (part.rank == 0 || first + kWarpOutputs <= 0 || first >= part.num_outputs) continue;
    const auto load = [&](int output, int rank) {
      Word4 piece = {};
      if (rank >= part.rank || output < 0 || output >= part.num_outputs) return piece;
      return *reinterpret_cast<const Word4*>(reinterpret_cast<const T*>(part.b) +
                                             int64_t{output} * part.rank + rank);
    };
    for (int begin = 0; begin < part.rank; begin += kStepRanks) {
      const int rank = begin + lane_id() % 4 * kPieceRanks;
      Word4 own = {};
      if (group < tile.num_rows && rank < part.rank) {
        own = sum_splits<T>(partials + number * args.max_rank + rank, num_splits, split_values);
      }
#pragma unroll
      for (int product = 0; product < kProducts; ++product) {
        const int output = first + product * kOutputs + group;
        const Word4 low = load(output, rank);
        const Word4 high = load(output + 8, rank);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t weights[4] = {low.at[2 * half], high.at[2 * half], low.at[2 * half + 1],
                                       high.at[2 * half + 1]};
          multiply_add<T>(sums[product], weights, own.at[2 * half], own.at[2 * half + 1]);
        }
      }
    }
  }
#pragma unroll
  for (int product = 0; product < kProducts; ++product) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Element at = fragment_c(lane_id(), i);
      const int output = first_output + product * kOutputs + at.row;
      if (at.column >= tile.num_rows || output >= args.num_outputs) continue;
      args.y[(int64_t{tile.first_row} + at.column) * args.num_outputs + output] += sums[product][i];
    }
  }
}

}  // namespace
}  // namespace lmi::cuda

using namespace lmi::cuda;

int32_t lmi_cuda_lora_add(const LmiLoraAdd* args, void* stream) {
  if (const int32_t status = check_bf16("lora_add", args->dtype)) return status;
  if (args->num_inputs % 8 != 0 || args->max_rank % 8 != 0) {
    return fail("lora_add: " + std::to_string(args->num_inputs) + " inputs and ranks up to " +
                std::to_string(args->max_rank) + "; multiples of 8 can be had");
  }
  if (!is_aligned(args->x) || reinterpret_cast<uintptr_t>(args->partials) % 32 != 0) {
    return fail("lora_add: x must start on 16 bytes, partials on 32");
  }
  if (const int32_t status = launch_lora_few_rows(*args, stream)) return status;
  const Grid grid = {ceil_div(args->num_outputs, kBlockOutputs), args->num_tiles};
  return launch("lora_add", lora_outputs_kernel<bf16>, grid, kWarps * kWarpSize, 0, stream, *args);
}
