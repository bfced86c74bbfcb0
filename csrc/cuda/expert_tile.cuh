// Products of rows that are sorted by expert with each row's own expert's matrix: a block's rows
// are a tile of one expert's, found on the device, so that the host needn't know how many each has.
// A launch has as many tiles as the most that so many rows can fall into.
#pragma once

#include "cuda/device.cuh"
#include "cuda/lmi_cuda.h"

namespace lmi::cuda {

struct ExpertTile {
  int expert;
  int first_row;
  int num_rows;  // 0: there is no such tile
};

// Of the warp's lanes up to this one.
__device__ inline int sum_up_to_lane(int value) {
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const int below = shuffle(value, greater_of(lane_id() - distance, 0));
    if (lane_id() >= distance) value += below;
  }
  return value;
}

// The same in all threads of a warp, all of which call it. first_rows: [num_experts + 1].
template <int kRows>
__device__ ExpertTile find_expert_tile(const int32_t* first_rows, int num_experts, int tile) {
  ExpertTile own = {};
  int num_before = 0;
  for (int begin = 0; begin < num_experts; begin += kWarpSize) {
    const int expert = lower_of(begin + lane_id(), num_experts);
    const int first = first_rows[expert];
    const int num_rows = first_rows[lower_of(expert + 1, num_experts)] - first;
    const int num_tiles = ceil_div(num_rows, kRows);
    const int next = sum_up_to_lane(num_tiles);
    const int at = tile - num_before - (next - num_tiles);
    if (at >= 0 && at < num_tiles) {
      own = {expert, first + at * kRows, lower_of(num_rows - at * kRows, kRows)};
    }
    num_before += shuffle(next, kWarpSize - 1);
  }
  return {warp_sum(own.expert), warp_sum(own.first_row), warp_sum(own.num_rows)};
}

// An expert's last tile need not be full.
LMI_HOST_DEVICE constexpr int64_t most_expert_tiles(int num_rows, int num_experts, int tile_rows) {
  return lower_of(num_experts, num_rows) + num_rows / tile_rows;
}

// Rows of an expert on average, from which on products take larger tiles: by estimate.
constexpr int kFewExpertRows = 4;

// Of arguments for the products of tiles: the matrix, and rows without those before.
__device__ inline void take_matrix(LmiLinearPacked& args, const void* matrix) {
  args.panels = matrix;
}
__device__ inline void take_matrix(LmiLinearQuantized& args, const void* matrix) {
  args.panels = matrix;
}
__device__ inline void skip_rows(LmiLinearPacked& args, int num_rows) {
  args.x = static_cast<const bf16*>(args.x) + int64_t{num_rows} * args.num_inputs;
}
__device__ inline void skip_rows(LmiLinearQuantized& args, int num_rows) {
  args.codes += int64_t{num_rows} * args.stride;
  args.row_scales += num_rows;
  if (args.outliers != nullptr) args.outliers += int64_t{num_rows} * args.outlier_stride;
}

// Makes a product's arguments those of a tile's rows and their expert's matrix alone; false: the
// tile has none. With token_rows they say which rows of the operand the tile's are.
template <int kRows, typename Args>
__device__ bool take_expert_tile(Args& args, int tile) {
  const ExpertTile own = find_expert_tile<kRows>(args.first_rows, args.num_experts, tile);
  args.num_rows = own.num_rows;
  if (own.num_rows == 0) return false;
  take_matrix(args, reinterpret_cast<const void*>(args.matrices[own.expert]));
  if (args.bias != nullptr) args.bias += int64_t{own.expert} * args.num_outputs;
  args.y += int64_t{own.first_row} * args.num_outputs;
  if (args.token_rows != nullptr) {
    args.token_rows += own.first_row;
  } else {
    skip_rows(args, own.first_row);
  }
  return true;
}

// The row of the operand that is a tile's row.
template <bool kIsExperts, typename Args>
__device__ int source_row(const Args& args, int row) {
  if constexpr (kIsExperts) {
    if (args.token_rows != nullptr) return args.token_rows[row];
  }
  return row;
}

}  // namespace lmi::cuda
