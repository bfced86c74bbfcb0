// Matrix products over int4 weights, activations in 16 bits (W4A16): few rows are bound by reading
// the weight once, many by the tensor cores and the unpacking before them.
//
// A block takes two panels, 32 outputs, and up to 64 rows; its warps take every eighth group of
// inputs. A thread reads 16 bytes of a panel, eight inputs of four outputs: with inputs and outputs
// both in an order of the kernel's own they are its right operands of eight products. Codes less
// their zero point are small integers, exact in either type; scales come in once per group, in
// fp32.
#include "cuda/fragment.h"
#include "cuda/int4_panel.h"
#include "cuda/launch.cuh"

namespace lmi::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kPanels = 2;
constexpr int kOutputs = kPanels * kPanelOutputs;
constexpr int kTiles = 4;        // of 8 outputs
constexpr int kStepInputs = 32;  // of which each lane of a group of four has eight
constexpr int kMaxRowTiles = 4;

// Column c of tile j is this lane of this panel, so that a thread's four tiles are neighbours.
LMI_HOST_DEVICE constexpr int panel_of(int column) { return column / 4; }
LMI_HOST_DEVICE constexpr int panel_lane_of(int column, int tile) { return column % 4 * 4 + tile; }

template <typename T>
struct Codes;
template <>
struct Codes<bf16> {
  static constexpr uint32_t kBase = 0x4300;  // 128
};
template <>
struct Codes<f16> {
  static constexpr uint32_t kBase = 0x6400;  // 1024
};

template <typename T, int kRowTiles>
class Int4Warp {
 public:
  __device__ explicit Int4Warp(const LmiLinearInt4& args)
      : args_(args),
        first_row_(static_cast<int>(blockIdx.y) * 16 * kRowTiles),
        panel_bytes_(panel_bytes(args.num_inputs, args.group_size)),
        first_panel_(static_cast<int>(blockIdx.x) * kPanels),
        num_panels_(num_panels(args.num_outputs, args.is_gated)) {}

  __device__ void multiply() {
    const int num_groups = ceil_div(args_.num_inputs, args_.group_size);
    for (int group = warp_id(); group < num_groups; group += kWarps) multiply_group(group);
  }

  // [16 rows kRowTiles][32 outputs, by panel and lane]
  __device__ void store(float* target) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const Element at = fragment_c(lane_id(), i);
          const int output = panel_of(at.column) * kPanelOutputs + panel_lane_of(at.column, tile);
          target[(m * 16 + at.row) * kOutputs + output] = sums_[m][tile][i];
        }
      }
    }
  }

 private:
  // A panel past the last reads the last one's bytes; its outputs are not stored.
  __device__ const uint8_t* panel_group(int panel, int group) const {
    const int64_t index = lower_of(first_panel_ + panel, num_panels_ - 1);
    return static_cast<const uint8_t*>(args_.panels) + index * panel_bytes_ +
           group * panel_group_bytes(args_.group_size);
  }

  __device__ void multiply_group(int group) {
    const int column = fragment_group(lane_id());
    const uint8_t* base = panel_group(panel_of(column), group);
    const auto zeros = *reinterpret_cast<const Vector<f16, kTiles>*>(base + kPanelZerosOffset +
                                                                     panel_lane_of(column, 0) * 2);
    uint32_t zero_pairs[kTiles];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const float zero = to_float(zeros.at[tile]);
      zero_pairs[tile] = pack_pair<T>(zero, zero);
    }
    float products[kRowTiles][kTiles][4] = {};
    const uint8_t* words =
        base + kPanelHeaderBytes + lane_id() % 4 * kPanelStepBytes + panel_lane_of(column, 0) * 4;
    const int first_input = group * args_.group_size + lane_id() % 4 * 8;
#pragma unroll 4
    for (int step = 0; step < args_.group_size / kStepInputs; ++step) {
      multiply_step(*reinterpret_cast<const Word4*>(words + step * 4 * kPanelStepBytes),
                    first_input + step * kStepInputs, zero_pairs, products);
    }
    add_scaled(group, products);
  }

  __device__ void multiply_step(const Word4& words, int input, const uint32_t (&zeros)[kTiles],
                                float (&products)[kRowTiles][kTiles][4]) const {
    constexpr uint32_t kBase = Codes<T>::kBase;
    constexpr uint32_t kBasePair = kBase | kBase << 16;
    Word4 rows[kRowTiles][2];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rows[m][half] = load_x(first_row_ + m * 16 + half * 8 + fragment_group(lane_id()), input);
      }
    }
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        uint32_t weights[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t codes = code_pair(words.at[tile], part * 4 + i * 2, kBase);
          weights[i] = subtract_pairs<T>(subtract_pairs<T>(codes, kBasePair), zeros[tile]);
        }
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          const uint32_t own[4] = {rows[m][0].at[2 * part], rows[m][1].at[2 * part],
                                   rows[m][0].at[2 * part + 1], rows[m][1].at[2 * part + 1]};
          multiply_add<T>(products[m][tile], own, weights[0], weights[1]);
        }
      }
    }
  }

  __device__ Word4 load_x(int row, int input) const {
    if (row >= args_.num_rows || input >= args_.num_inputs) return {};
    const int64_t at = static_cast<int64_t>(row) * args_.num_inputs + input;
    return *reinterpret_cast<const Word4*>(static_cast<const T*>(args_.x) + at);
  }

  __device__ void add_scaled(int group, const float (&products)[kRowTiles][kTiles][4]) {
    const int column = fragment_pair(lane_id());  // and its neighbour, which is in the same panel
    const auto scales = *reinterpret_cast<const Vector<f16, 2 * kTiles>*>(
        panel_group(panel_of(column), group) + panel_lane_of(column, 0) * 2);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float scale = to_float(scales.at[i % 2 * kTiles + tile]);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) sums_[m][tile][i] += scale * products[m][tile][i];
      }
    }
  }

  const LmiLinearInt4& args_;
  int first_row_;
  int64_t panel_bytes_;
  int first_panel_;
  int num_panels_;
  float sums_[kRowTiles][kTiles][4] = {};
};

template <int kRowTiles>
constexpr int kSharedBytes = kWarps * 16 * kRowTiles * kOutputs * static_cast<int>(sizeof(float));

template <typename T, int kRowTiles>
__global__ void __launch_bounds__(kThreads) linear_int4_kernel(const LmiLinearInt4 args) {
  constexpr int kRows = 16 * kRowTiles;
  float* partials = reinterpret_cast<float*>(shared_memory());
  Int4Warp<T, kRowTiles> warp(args);
  warp.multiply();
  warp.store(partials + warp_id() * kRows * kOutputs);
  block_barrier();
  for (int index = static_cast<int>(threadIdx.x); index < kRows * kOutputs; index += kThreads) {
    const int row = static_cast<int>(blockIdx.y) * kRows + index / kOutputs;
    const int lane = index % kOutputs;
    const int panel = static_cast<int>(blockIdx.x) * kPanels + lane / kPanelOutputs;
    const int output =
        panel_output(panel, lane % kPanelOutputs, args.num_outputs, args.is_gated != 0);
    if (row >= args.num_rows || output < 0) continue;
    float sum = args.bias == nullptr ? 0.0f : args.bias[output];
    for (int w = 0; w < kWarps; ++w) sum += partials[w * kRows * kOutputs + index];
    args.y[static_cast<int64_t>(row) * args.num_outputs + output] = sum;
  }
}

}  // namespace
}  // namespace lmi::cuda

using namespace lmi::cuda;

int32_t lmi_cuda_linear_int4(const LmiLinearInt4* args, void* stream) {
  const int32_t group = args->group_size;
  if (args->num_inputs < 8 || args->num_inputs % 8 != 0 ||
      (group != 32 && group != 64 && group != 128)) {
    return fail("linear_int4: " + std::to_string(args->num_inputs) + " inputs in groups of " +
                std::to_string(group) + "; multiples of 8 in groups of 32, 64 or 128 can be had");
  }
  if (!is_aligned(args->x) || !is_aligned(args->panels)) {
    return fail("linear_int4: x and the panels must start on 16 bytes");
  }
  const auto run = [&](auto element, auto row_tiles) {
    constexpr int kRowTiles = decltype(row_tiles)::value;
    const int panels = num_panels(args->num_outputs, args->is_gated != 0);
    const Grid grid = {ceil_div(panels, kPanels), ceil_div(args->num_rows, 16 * kRowTiles)};
    return launch("linear_int4", linear_int4_kernel<decltype(element), kRowTiles>, grid, kThreads,
                  kSharedBytes<kRowTiles>, stream, *args);
  };
  const auto with_rows = [&](auto element) {
    if (args->num_rows <= 16) return run(element, std::integral_constant<int, 1>{});
    if (args->num_rows <= 32) return run(element, std::integral_constant<int, 2>{});
    return run(element, std::integral_constant<int, kMaxRowTiles>{});
  };
  if (args->dtype == LMI_BF16) return with_rows(bf16{});
  if (args->dtype == LMI_F16) return with_rows(f16{});
  return fail("linear_int4: element type " + std::to_string(args->dtype) +
              "; 1 (bf16) and 2 (fp16) can be had");
}
