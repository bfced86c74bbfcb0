// What products of quantised rows and weights have in common: their codes, and sums of a warp's
// tiles over them.
#pragma once

#include "cuda/fragment.h"
#include "cuda/launch.cuh"
#include "cuda/weight_panel.h"

namespace lmi::cuda {

constexpr int kColumnTiles = 4;  // of 8 outputs: a warp takes two panels
constexpr int kWarpPanels = 2;
constexpr int kGroupInputs = 128;

// int8: sums are exact, so no order of adding up matters.
struct Int8 {
  using Sum = int32_t;

  // Panels hold 128 more than the weight over its scale.
  __device__ static uint32_t weights(uint32_t word) { return word ^ 0x80808080u; }
  __device__ static void multiply(Sum (&sums)[4], const uint32_t (&rows)[4], uint32_t low,
                                  uint32_t high) {
    multiply_add_bytes(sums, rows, low, high);
  }
};

// Sums of 16 kRowTiles rows and two panels.
template <typename Codes, int kRowTiles>
class QuantizedSums {
 public:
  using Sum = typename Codes::Sum;

  // 32 inputs: `low` and `high` are the words of four neighbouring outputs, one per tile.
  __device__ void multiply(const uint32_t (&rows)[kRowTiles][4], const Word4& low,
                           const Word4& high) {
#pragma unroll
    for (int tile = 0; tile < kColumnTiles; ++tile) {
      const uint32_t weights[2] = {Codes::weights(low.at[tile]), Codes::weights(high.at[tile])};
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        Codes::multiply(sums_[m][tile], rows[m], weights[0], weights[1]);
      }
    }
  }

  __device__ Sum at(int m, int tile, int index) const { return sums_[m][tile][index]; }

 private:
  Sum sums_[kRowTiles][kColumnTiles][4] = {};
};

// sum * scales + bias, as the CPU rounds it.
__device__ inline float finish_sum(const LmiLinearQuantized& args, float sum, float weight_scale,
                                   int row, int output) {
  const float y = product_of(sum, weight_scale * args.row_scales[row]);
  return args.bias == nullptr ? y : y + args.bias[output];
}

__device__ inline float weight_scale_of(const uint8_t* panel, int lane) {
  return reinterpret_cast<const float*>(panel)[lane];
}

// For many rows: linear_quantized_tiles.cu.
int32_t launch_quantized_tiles(const LmiLinearQuantized& args, void* stream);

}  // namespace lmi::cuda
