// Matrix products over int4 weights, activations in 16 bits (W4A16): few rows are bound by reading
// the weight once, more by the tensor cores and the unpacking before them. Many rows unpack the
// weight for good: linear_unpacked.cu.
//
// A block takes two panels, 32 outputs, and up to 64 rows; its warps take every eighth group of
// inputs. A thread reads eight inputs of four outputs, 16 bytes of a panel: with inputs and outputs
// both in an order of the kernel's own they are its right operands of eight products. Codes less
// their zero point are small integers, exact in either type; scales come in once per group, in
// fp32.
#include "cuda/fragment.h"
#include "cuda/launch.cuh"
#include "cuda/linear_unpacked.h"
#include "cuda/panel_sums.cuh"

namespace lmi::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kPanels = 2;
constexpr int kOutputs = kSumOutputs;
constexpr int kTiles = kSumTiles;  // of 8 outputs
constexpr int kStepInputs = 32;    // of which each lane of a group of four has eight
constexpr int kMaxRowTiles = 4;
constexpr int kScales = 8;  // of the outputs of a thread's sums

template <typename T>
constexpr uint32_t kCodeBase = 0;
template <>
constexpr uint32_t kCodeBase<bf16> = 0x4300;  // 128
template <>
constexpr uint32_t kCodeBase<f16> = 0x6400;  // 1024

// A group of inputs of four neighbouring outputs of an int4 panel.
template <typename T>
class Int4Group {
 public:
  __device__ Int4Group(const uint8_t* panel, int lane, const LmiLinearPacked& args, int group)
      : group_(panel + group * panel_group_bytes(args.group_size)), lane_(lane) {
    const auto zeros =
        *reinterpret_cast<const Vector<f16, kTiles>*>(group_ + kPanelZerosOffset + lane * 2);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const float zero = to_float(zeros.at[tile]);
      zeros_[tile] = pack_pair<T>(zero, zero);
    }
  }

  // Inputs first .. first + 7 of the group, which is padded to its end.
  __device__ Word4 load(int first) const {
    return *reinterpret_cast<const Word4*>(group_ + kPanelHeaderBytes +
                                           first / 8 * kPanelStepBytes + lane_ * 4);
  }

  // Inputs i and i + 1 of the step, i even.
  __device__ uint32_t pair(const Word4& words, int tile, int i) const {
    constexpr uint32_t kBase = kCodeBase<T>;
    const uint32_t codes = code_pair(words.at[tile], i, kBase);
    return subtract_pairs<T>(subtract_pairs<T>(codes, kBase | kBase << 16), zeros_[tile]);
  }

  __device__ static void load_scales(const uint8_t* panel, int lane, const LmiLinearPacked& args,
                                     int group, float (&scales)[kScales]) {
    const auto halves = *reinterpret_cast<const Vector<f16, kScales>*>(
        panel + group * panel_group_bytes(args.group_size) + lane * 2);
#pragma unroll
    for (int i = 0; i < kScales; ++i) scales[i] = to_float(halves.at[i]);
  }

 private:
  const uint8_t* group_;
  int lane_;
  uint32_t zeros_[kTiles];
};

template <typename T, int kRowTiles>
class PackedWarp {
 public:
  __device__ explicit PackedWarp(const LmiLinearPacked& args)
      : args_(args),
        first_row_(static_cast<int>(blockIdx.y) * 16 * kRowTiles),
        panel_bytes_(panel_bytes(args.num_inputs, args.group_size)),
        first_panel_(static_cast<int>(blockIdx.x) * kPanels),
        num_panels_(num_panels(args.num_outputs, args.is_gated)) {}

  __device__ void multiply() {
    const int num_groups = ceil_div(args_.num_inputs, args_.group_size);
    for (int group = warp_id(); group < num_groups; group += kWarps) multiply_group(group);
  }

  __device__ void store(float* target) const {
    store_sums<kRowTiles>(target, [&](int m, int tile, int i) { return sums_[m][tile][i]; });
  }

 private:
  // A panel past the last reads the last one's bytes; its outputs are not stored.
  __device__ const uint8_t* panel_at(int panel) const {
    const int64_t index = lower_of(first_panel_ + panel, num_panels_ - 1);
    return static_cast<const uint8_t*>(args_.panels) + index * panel_bytes_;
  }

  __device__ void multiply_group(int index) {
    const int column = fragment_group(lane_id());
    const Int4Group<T> group(panel_at(panel_of(column)), panel_lane_of(column, 0), args_, index);
    float products[kRowTiles][kTiles][4] = {};
    const int own = lane_id() % 4 * 8;
    const int first_input = index * args_.group_size + own;
#pragma unroll 4
    for (int first = 0; first < args_.group_size; first += kStepInputs) {
      multiply_step(group, group.load(own + first), first_input + first, products);
    }
    add_scaled(index, products);
  }

  __device__ void multiply_step(const Int4Group<T>& group, const Word4& words, int input,
                                float (&products)[kRowTiles][kTiles][4]) const {
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
        const uint32_t weights[2] = {group.pair(words, tile, part * 4),
                                     group.pair(words, tile, part * 4 + 2)};
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
    float scales[kScales];
    Int4Group<T>::load_scales(panel_at(panel_of(column)), panel_lane_of(column, 0), args_, group,
                              scales);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float scale = scales[i % 2 * kTiles + tile];
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) sums_[m][tile][i] += scale * products[m][tile][i];
      }
    }
  }

  const LmiLinearPacked& args_;
  int first_row_;
  int64_t panel_bytes_;
  int first_panel_;
  int num_panels_;
  float sums_[kRowTiles][kTiles][4] = {};
};

template <int kRowTiles>
constexpr int kSharedBytes = kWarps * 16 * kRowTiles * kSumStride * static_cast<int>(sizeof(float));

template <typename T, int kRowTiles>
__global__ void __launch_bounds__(kThreads) linear_packed_kernel(const LmiLinearPacked args) {
  constexpr int kRows = 16 * kRowTiles;
  float* partials = reinterpret_cast<float*>(shared_memory());
  PackedWarp<T, kRowTiles> warp(args);
  warp.multiply();
  warp.store(partials + warp_id() * kRows * kSumStride);
  block_barrier();
  for (int index = static_cast<int>(threadIdx.x); index < kRows * kOutputs; index += kThreads) {
    const int row = static_cast<int>(blockIdx.y) * kRows + index / kOutputs;
    const int lane = index % kOutputs;
    const int panel = static_cast<int>(blockIdx.x) * kPanels + lane / kPanelOutputs;
    const int output =
        panel_output(panel, lane % kPanelOutputs, args.num_outputs, args.is_gated != 0);
    if (row >= args.num_rows || output < 0) continue;
    const float bias = args.bias == nullptr ? 0.0f : args.bias[output];
    args.y[static_cast<int64_t>(row) * args.num_outputs + output] =
        sum_of_warps<kWarps>(partials, kRows, sum_offset(index / kOutputs, lane), bias);
  }
}

}  // namespace
}  // namespace lmi::cuda

using namespace lmi::cuda;

int32_t lmi_cuda_linear_packed(const LmiLinearPacked* args, void* stream) {
  const int32_t group = args->group_size;
  if (group != 32 && group != 64 && group != 128) {
    return fail("linear_packed: groups of " + std::to_string(group) +
                "; 32, 64 and 128 can be had");
  }
  if (args->num_inputs < 8 || args->num_inputs % 8 != 0) {
    return fail("linear_packed: " + std::to_string(args->num_inputs) +
                " inputs; multiples of 8 can be had");
  }
  if (!is_aligned(args->x) || !is_aligned(args->panels)) {
    return fail("linear_packed: x and the panels must start on 16 bytes");
  }
  if (args->dtype != LMI_BF16 && args->dtype != LMI_F16) {
    return fail("linear_packed: element type " + std::to_string(args->dtype) +
                "; 1 (bf16) and 2 (fp16) can be had");
  }
  if (is_unpacked(*args)) return launch_linear_unpacked(*args, stream);
  const auto run = [&](auto element, auto row_tiles) {
    constexpr int kRowTiles = decltype(row_tiles)::value;
    const int panels = num_panels(args->num_outputs, args->is_gated != 0);
    const Grid grid = {ceil_div(panels, kPanels), ceil_div(args->num_rows, 16 * kRowTiles)};
    return launch("linear_packed", linear_packed_kernel<decltype(element), kRowTiles>, grid,
                  kThreads, kSharedBytes<kRowTiles>, stream, *args);
  };
  const auto with_rows = [&](auto element) {
    if (args->num_rows <= 16) return run(element, std::integral_constant<int, 1>{});
    if (args->num_rows <= 32) return run(element, std::integral_constant<int, 2>{});
    return run(element, std::integral_constant<int, kMaxRowTiles>{});
  };
  return args->dtype == LMI_BF16 ? with_rows(bf16{}) : with_rows(f16{});
}
