// A warp's products over int4 weights: 32 outputs, two panels, of which stretches of 128 inputs lie
// in shared memory.
//
// Outputs are the left side of the tensor cores' products: a thread reads eight inputs of four
// outputs, 16 bytes of a panel, and with inputs and outputs both in an order of the kernel's own
// they are its part of four left operands, as 16 bytes of a row are its part of two right ones.
// Codes less their zero point are small integers, exact in bf16; scales come in once per
// group, in fp32.
//
// Stretches are dealt out to kClasses classes, every kClasses-th to the same; a sum is that of the
// classes' sums in their order. So who sums up a class doesn't matter to the bits of a result.
#pragma once

#include "cuda/fragment.h"
#include "cuda/launch.cuh"
#include "cuda/weight_panel.h"

namespace lmi::cuda {

constexpr int kClasses = 8;
constexpr int kStepInputs = 32;  // of which each lane of a group of four has eight
constexpr int kSteps = 4;        // of a stretch
constexpr int kStretchInputs = kSteps * kStepInputs;
constexpr int kWarpPanels = 2;
constexpr int kMinGroup = 32;
constexpr int kMaxFewPackedRows = 16;  // more are those of linear_packed_tiles.cu

// A stretch of a panel in shared memory: lines of 64 bytes, which are headers of groups or eight
// inputs. Four lines, of four lanes each, are read at once; lines two apart would meet in the same
// banks.
constexpr int kLineBytes = 64;
constexpr int kChunkBytes = 16;
constexpr int kStretchBytes =
    kStretchInputs / kMinGroup * static_cast<int>(panel_group_bytes(kMinGroup));

LMI_HOST_DEVICE constexpr int staged_chunk(int line, int chunk) {
  return line * kLineBytes + (chunk ^ (line & 2)) * kChunkBytes;
}

// 128 in bf16, to whose bits a code may be added, twice: its upper bytes stay as they are.
constexpr uint32_t kCodeBase = 0x43004300;

// Sums of 8 kRowTiles rows. kGroup: inputs of a group; 0: as many as its argument says, of which
// each step then asks whether one begins or ends there.
template <typename T, int kRowTiles, int kGroup = 0>
class PackedProducts {
 public:
  static constexpr int kQuad = 4;  // outputs of a thread, the rows of two products

  __device__ explicit PackedProducts(int group_size) : group_lines_(group_size / 8 + 1) {}

  // Of a stretch from first_input on. `stage`: of two panels, kStretchBytes apart. rows(step, tile)
  // gives this thread's eight inputs of a row, zeros for those past num_inputs.
  template <typename Rows>
  __device__ void multiply(const uint8_t* stage, int first_input, int num_inputs,
                           const Rows& rows) {
    if (first_input + kStretchInputs <= num_inputs) {
      multiply_stretch<true>(stage, first_input, num_inputs, rows);
    } else {
      multiply_stretch<false>(stage, first_input, num_inputs, rows);
    }
  }

  // Of row fragment_pair() + i of a tile, four neighbouring outputs of a panel (own_panel()).
  __device__ float at(int tile, int i, int j) const { return sums_[tile][j / 2][j % 2 * 2 + i]; }

  // To sum up another class.
  __device__ void clear() {
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int j = 0; j < kQuad; ++j)
        sums_[n][j / 2][j % 2 * 2] = sums_[n][j / 2][j % 2 * 2 + 1] = 0;
    }
  }

  // Of the warp's two, the panel whose outputs this thread sums up, and the first of them.
  __device__ static int own_panel() { return panel_of(fragment_group(lane_id())); }
  __device__ static int own_output() { return panel_lane_of(fragment_group(lane_id()), 0); }

 private:
  using Products = float[kRowTiles][kQuad / 2][4];

  // kIsWhole: none of its inputs is past the last.
  template <bool kIsWhole, typename Rows>
  __device__ void multiply_stretch(const uint8_t* stage, int first_input, int num_inputs,
                                   const Rows& rows) {
    const int quad = fragment_group(lane_id()) % kQuad;
    const uint8_t* panel = stage + own_panel() * kStretchBytes;
    Products products = {};
    uint32_t zeros[kQuad] = {};
    int header = 0;
    int line = 1;  // of the step's first inputs
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int input = first_input + step * kStepInputs;
      if (!kIsWhole && input >= num_inputs) break;
      if (line == header + 1) load_zeros(panel, header, quad, zeros);
      const auto words =
          *reinterpret_cast<const Word4*>(panel + staged_chunk(line + lane_id() % 4, quad));
      multiply_step(words, zeros, step, rows, products);
      line += kStepInputs / 8;
      if (line == header + group_lines() || (!kIsWhole && input + kStepInputs >= num_inputs)) {
        add_scaled(panel, header, quad, products);
        header = line;
        ++line;
      }
    }
  }

  template <typename Rows>
  __device__ void multiply_step(const Word4& words, const uint32_t (&zeros)[kQuad], int step,
                                const Rows& rows, Products& products) const {
    Word4 own_rows[kRowTiles];
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) own_rows[n] = rows(step, n);
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      uint32_t weights[kQuad][2];
#pragma unroll
      for (int j = 0; j < kQuad; ++j) {
        const uint32_t codes = half_codes(words.at[j], part);
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          const uint32_t raised = permute_bytes(codes, kCodeBase >> 8, code_pair_selector(pair));
          weights[j][pair] = subtract_pairs<T>(raised, zeros[j]);
        }
      }
#pragma unroll
      for (int j = 0; j < kQuad; j += 2) {
        const uint32_t own[4] = {weights[j][0], weights[j + 1][0], weights[j][1],
                                 weights[j + 1][1]};
#pragma unroll
        for (int n = 0; n < kRowTiles; ++n) {
          multiply_add<T>(products[n][j / 2], own, own_rows[n].at[2 * part],
                          own_rows[n].at[2 * part + 1]);
        }
      }
    }
  }

  __device__ int group_lines() const { return kGroup == 0 ? group_lines_ : kGroup / 8 + 1; }

  // Four halves of a group's header.
  __device__ static void load_header(const uint8_t* panel, int header, int chunk, int quad,
                                     float (&values)[kQuad]) {
    const auto halves = *reinterpret_cast<const Vector<f16, kQuad>*>(
        panel + staged_chunk(header, chunk + quad / 2) + quad % 2 * (kChunkBytes / 2));
#pragma unroll
    for (int j = 0; j < kQuad; ++j) values[j] = to_float(halves.at[j]);
  }

  // Zero points, each twice, over the number that codes are added to.
  __device__ static void load_zeros(const uint8_t* panel, int header, int quad,
                                    uint32_t (&zeros)[kQuad]) {
    const float base = to_float(T{static_cast<uint16_t>(kCodeBase)});
    float values[kQuad];
    load_header(panel, header, kPanelZerosOffset / kChunkBytes, quad, values);
#pragma unroll
    for (int j = 0; j < kQuad; ++j) zeros[j] = pack_pair<T>(base + values[j], base + values[j]);
  }

  // Products are 0 afterwards.
  __device__ void add_scaled(const uint8_t* panel, int header, int quad, Products& products) {
    float scales[kQuad];
    load_header(panel, header, 0, quad, scales);
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int j = 0; j < kQuad; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at = j % 2 * 2 + i;
          sums_[n][j / 2][at] += scales[j] * products[n][j / 2][at];
          products[n][j / 2][at] = 0.0f;
        }
      }
    }
  }

  int group_lines_;  // with its header
  float sums_[kRowTiles][kQuad / 2][4] = {};
};

// Calls action(kGroup) with the inputs of a group where these are a stretch, as they usually are;
// 0: others.
template <typename Action>
int32_t with_group(const LmiLinearPacked& args, const Action& action) {
  if (args.group_size == kStretchInputs) {
    return action(std::integral_constant<int, kStretchInputs>{});
  }
  return action(std::integral_constant<int, 0>{});
}

// For more than kMaxFewPackedRows rows: linear_packed_tiles.cu.
int32_t launch_packed_tiles(const LmiLinearPacked& args, void* stream);

}  // namespace lmi::cuda
