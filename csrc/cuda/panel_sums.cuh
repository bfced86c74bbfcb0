// Sums of the products over panels, which a block's warps put together in shared memory.
#pragma once

#include "cuda/device.cuh"
#include "cuda/fragment.h"
#include "cuda/weight_panel.h"

namespace lmi::cuda {

// Of two panels. The four tiles of a thread are neighbours, stored as one; with rows so far apart
// the threads that are served together find their four words in different banks.
constexpr int kSumOutputs = 2 * kPanelOutputs;
constexpr int kSumStride = kSumOutputs + 4;
constexpr int kSumTiles = 4;

LMI_HOST_DEVICE constexpr int sum_offset(int row, int output) { return row * kSumStride + output; }

// target: [16 rows kRowTiles][kSumStride], at(m, tile, i): what the lane has.
template <int kRowTiles, typename Sum, typename At>
__device__ void store_sums(Sum* target, const At& at) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Element place = fragment_c(lane_id(), i);
      const int output = panel_of(place.column) * kPanelOutputs + panel_lane_of(place.column, 0);
      Vector<Sum, kSumTiles> sums;
#pragma unroll
      for (int tile = 0; tile < kSumTiles; ++tile) sums.at[tile] = at(m, tile, i);
      *reinterpret_cast<Vector<Sum, kSumTiles>*>(target + sum_offset(m * 16 + place.row, output)) =
          sums;
    }
  }
}

// The sum of the warps' at that place; partials: [num_warps][rows][kSumStride].
template <int kNumWarps, typename Sum>
__device__ Sum sum_of_warps(const Sum* partials, int num_rows, int offset, Sum sum) {
  for (int warp = 0; warp < kNumWarps; ++warp) {
    sum += partials[warp * num_rows * kSumStride + offset];
  }
  return sum;
}

}  // namespace lmi::cuda
