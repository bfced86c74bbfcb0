// What products of quantised rows and weights have in common: their codes, and sums of a warp's
// tiles over them.
#pragma once

#include "cuda/expert_tile.cuh"
#include "cuda/fragment.h"
#include "cuda/launch.cuh"
#include "cuda/weight_panel.h"

namespace lmi::cuda {

constexpr int kColumnTiles = 4;  // of 8 outputs: a warp takes two panels
constexpr int kWarpPanels = 2;

// int8: sums are exact, so no order of adding up matters.
struct Int8 {
  using Sum = int32_t;
  static constexpr bool kIsGrouped = false;
  static constexpr bool kIsSummedInGroups = false;

  // Panels hold 128 more than the weight over its scale.
  __device__ static uint32_t weights(uint32_t word) { return word ^ 0x80808080u; }
  __device__ static void multiply(Sum (&sums)[4], const uint32_t (&rows)[4], uint32_t low,
                                  uint32_t high) {
    multiply_add_bytes(sums, rows, low, high);
  }
};

// fp8: tensor cores may keep fewer bits of a sum than fp32 has, so sums of a group of inputs leave
// them. kGrouped: groups have scales.
template <bool kGrouped>
struct Fp8 {
  using Sum = float;
  static constexpr bool kIsGrouped = kGrouped;
  static constexpr bool kIsSummedInGroups = true;

  __device__ static uint32_t weights(uint32_t word) { return word; }
  __device__ static void multiply(Sum (&sums)[4], const uint32_t (&rows)[4], uint32_t low,
                                  uint32_t high) {
    multiply_add_e4m3(sums, rows, low, high);
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
        Codes::multiply(products_[m][tile], rows[m], weights[0], weights[1]);
      }
    }
  }

  // After each group of inputs. `header`: the group's in the panel of this thread's sums, in
  // columns fragment_pair() and the next.
  __device__ void end_group(const uint8_t* header) {
    if constexpr (Codes::kIsSummedInGroups) {
      float scales[8] = {1, 1, 1, 1, 1, 1, 1, 1};
      if constexpr (Codes::kIsGrouped) {
        const int lane = panel_lane_of(fragment_pair(lane_id()), 0);
        load_vector(reinterpret_cast<const float*>(header) + lane, scales);
      }
#pragma unroll
      for (int tile = 0; tile < kColumnTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
            sums_[m][tile][i] += scales[i % 2 * kColumnTiles + tile] * products_[m][tile][i];
            products_[m][tile][i] = 0;
          }
        }
      }
    }
  }

  __device__ Sum at(int m, int tile, int index) const {
    return Codes::kIsSummedInGroups ? sums_[m][tile][index] : products_[m][tile][index];
  }

 private:
  __device__ static void load_vector(const float* source, float (&values)[8]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto four = reinterpret_cast<const Float4*>(source)[half];
#pragma unroll
      for (int i = 0; i < 4; ++i) values[half * 4 + i] = four.at[i];
    }
  }

  Sum products_[kRowTiles][kColumnTiles][4] = {};
  Sum sums_[kRowTiles][kColumnTiles][4] = {};
};

template <typename Codes>
__device__ const uint8_t* panel_at(const LmiLinearQuantized& args, int panel) {
  return static_cast<const uint8_t*>(args.panels) +
         panel * byte_panel_bytes(args.num_inputs, Codes::kIsGrouped);
}

// Of an output whose groups have none.
template <typename Codes>
__device__ float weight_scale_of(const LmiLinearQuantized& args, int panel, int lane) {
  if constexpr (Codes::kIsGrouped) {
    return 1.0f;
  } else {
    return reinterpret_cast<const float*>(panel_at<Codes>(args, panel))[lane];
  }
}

// Of a row, whose list is read once for all its outputs. int8 only.
template <typename Codes>
__device__ int num_outliers(const LmiLinearQuantized& args, int row) {
  if (!std::is_same_v<Codes, Int8> || args.outliers == nullptr) return 0;
  return args.outliers[int64_t{row} * args.outlier_stride];
}

// A row's sum with what its ``count`` outliers' high digits add.
template <typename Codes>
__device__ float total_of(const LmiLinearQuantized& args, typename Codes::Sum sum, int row,
                          int count, int panel, int lane) {
  float total = static_cast<float>(sum);
  if constexpr (std::is_same_v<Codes, Int8>) {
    if (count == 0) return total;
    const int32_t* list = args.outliers + int64_t{row} * args.outlier_stride;
    const uint8_t* weights = panel_at<Codes>(args, panel) + lane * 4;
    int32_t high_sum = 0;
    for (int i = 1; i <= count; ++i) {
      const int column = list[i] >> 8;
      const int high = static_cast<int8_t>(list[i] & 0xff);
      const int code = weights[byte_step_offset(column / 4, false) + column % 4];
      high_sum += high * (code - 128);
    }
    total += 256.0f * static_cast<float>(high_sum);
  }
  return total;
}

// sum * scales + bias, as the CPU rounds it.
__device__ inline float finish_sum(const LmiLinearQuantized& args, float sum, float weight_scale,
                                   int row, int output) {
  const float y = product_of(sum, weight_scale * args.row_scales[row]);
  return args.bias == nullptr ? y : y + args.bias[output];
}

// Calls action(Codes{}) with the codes that the arguments name.
template <typename Action>
int32_t with_codes(const LmiLinearQuantized& args, const Action& action) {
  if (args.code_type == LMI_I8 && args.group_size == 0) return action(Int8{});
  if (args.code_type == LMI_E4M3 && args.group_size == 0) return action(Fp8<false>{});
  if (args.code_type == LMI_E4M3 && args.group_size == kByteGroupInputs) return action(Fp8<true>{});
  return fail("linear_quantized: code type " + std::to_string(args.code_type) + " in groups of " +
              std::to_string(args.group_size) +
              "; 3 (int8) and 6 (e4m3) can be had, and groups of 128 of the latter");
}

// For many rows: linear_quantized_tiles.cu.
int32_t launch_quantized_tiles(const LmiLinearQuantized& args, void* stream);

}  // namespace lmi::cuda
