// Products of int8 or fp8 weights and rows quantised alike (W8A8), for up to 64 rows: bound by
// reading the weight once.
//
// A block takes two panels, 32 outputs; its warps take every eighth group of 128 inputs. The bytes
// of a panel are right operands as they are: a thread reads four inputs of four neighbouring
// outputs, 16 bytes, which are its words of four tiles. Both operands may take K in any common
// order: a thread of a group of four takes 16 neighbouring inputs of 64, so that it reads rows 16
// bytes at a time.
#include "cuda/panel_sums.cuh"
#include "cuda/quantized_codes.cuh"

namespace lmi::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kOutputs = kSumOutputs;
static_assert(kWarpPanels * kPanelOutputs == kSumOutputs && kColumnTiles == kSumTiles);
constexpr int kStepInputs = 64;  // of which each lane of a group of four has 16
constexpr int kMaxRowTiles = 4;

template <typename Codes, int kRowTiles>
class QuantizedWarp {
 public:
  __device__ explicit QuantizedWarp(const LmiLinearQuantized& args)
      : args_(args), num_steps_(ceil_div(args.num_inputs, 4)) {
    const int column = fragment_group(lane_id());
    words_ = near_panel(panel_of(column)) + panel_lane_of(column, 0) * 4;
  }

  // What the block's first groups will read; no kernel writes weights.
  __device__ void prefetch_weights() const {
    constexpr int kPanelThreads = kThreads / kWarpPanels;
    const int thread = static_cast<int>(threadIdx.x);
    const int64_t at = thread % kPanelThreads * kPrefetchBytes;
    if (at >= byte_panel_bytes(args_.num_inputs, Codes::kIsGrouped)) return;
    prefetch(near_panel(thread / kPanelThreads) + at);
  }

  __device__ void multiply() {
    const int num_groups = ceil_div(args_.num_inputs, kByteGroupInputs);
    const uint8_t* panel = near_panel(panel_of(fragment_pair(lane_id())));
    for (int group = warp_id(); group < num_groups; group += kWarps) {
#pragma unroll
      for (int first = 0; first < kByteGroupInputs; first += kStepInputs) {
        multiply_step(group * kByteGroupInputs + first + lane_id() % 4 * 16);
      }
      sums_.end_group(panel, group);
    }
  }

  __device__ void store(typename Codes::Sum* target) const {
    store_sums<kRowTiles>(target, [&](int m, int tile, int i) { return sums_.at(m, tile, i); });
  }

 private:
  // Of the block's two. One past the last reads the last one's bytes; its outputs are not stored.
  __device__ const uint8_t* near_panel(int number) const {
    const int last = num_panels(args_.num_outputs, args_.is_gated != 0) - 1;
    const int panel = static_cast<int>(blockIdx.x) * kWarpPanels + number;
    return panel_at<Codes>(args_, lower_of(panel, last));
  }

  // This thread's 16 inputs from `input`.
  __device__ void multiply_step(int input) {
    Word4 weights[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) weights[i] = load_weights(input / 4 + i);
    Word4 rows[kRowTiles][2];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rows[m][half] = load_codes(m * 16 + half * 8 + fragment_group(lane_id()), input);
      }
    }
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      uint32_t own[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) own[m][i] = rows[m][i % 2].at[2 * part + i / 2];
      }
      sums_.multiply(own, weights[2 * part], weights[2 * part + 1]);
    }
  }

  // Past the last input is another panel, or nothing.
  __device__ Word4 load_weights(int step) const {
    if (step >= num_steps_) return {};
    return *reinterpret_cast<const Word4*>(words_ + byte_step_offset(step, Codes::kIsGrouped));
  }

  // Past the last input are zeros.
  __device__ Word4 load_codes(int row, int input) const {
    if (row >= args_.num_rows) return {};
    return *reinterpret_cast<const Word4*>(args_.codes + int64_t{row} * args_.stride + input);
  }

  const LmiLinearQuantized& args_;
  int num_steps_;
  const uint8_t* words_;
  QuantizedSums<Codes, kRowTiles> sums_;
};

template <typename Codes, int kRowTiles>
__global__ void __launch_bounds__(kThreads) linear_quantized_kernel(const LmiLinearQuantized args) {
  using Sum = typename Codes::Sum;
  constexpr int kRows = 16 * kRowTiles;
  Sum* partials = reinterpret_cast<Sum*>(shared_memory());
  QuantizedWarp<Codes, kRowTiles> warp(args);
  warp.prefetch_weights();
  wait_for_earlier_kernels();
  warp.multiply();
  warp.store(partials + warp_id() * kRows * kSumStride);
  block_barrier();
  for (int index = static_cast<int>(threadIdx.x); index < args.num_rows * kOutputs;
       index += kThreads) {
    const int lane = index % kPanelOutputs;
    const int panel = static_cast<int>(blockIdx.x) * kWarpPanels + index % kOutputs / kPanelOutputs;
    const int output = panel_output(panel, lane, args.num_outputs, args.is_gated != 0);
    if (output < 0 || panel >= num_panels(args.num_outputs, args.is_gated != 0)) continue;
    const int row = index / kOutputs;
    const Sum sum =
        sum_of_warps<kWarps>(partials, kRows, sum_offset(row, index % kOutputs), Sum{0});
    const float scale = weight_scale_of<Codes>(args, panel, lane);
    const int count = num_outliers<Codes>(args, row);
    args.y[int64_t{row} * args.num_outputs + output] =
        finish_sum(args, total_of<Codes>(args, sum, row, count, panel, lane), scale, row, output);
  }
}

template <typename Codes>
int32_t launch_few_rows(const LmiLinearQuantized& args, void* stream) {
  const auto run = [&](auto row_tiles) {
    constexpr int kRowTiles = decltype(row_tiles)::value;
    const Grid grid = {ceil_div(num_panels(args.num_outputs, args.is_gated != 0), kWarpPanels)};
    const int shared_bytes = kWarps * 16 * kRowTiles * kSumStride * static_cast<int>(sizeof(float));
    return launch("linear_quantized", linear_quantized_kernel<Codes, kRowTiles>, grid, kThreads,
                  shared_bytes, stream, args);
  };
  if (args.num_rows == 0) return kOk;
  if (args.num_rows <= 16) return run(std::integral_constant<int, 1>{});
  if (args.num_rows <= 32) return run(std::integral_constant<int, 2>{});
  return run(std::integral_constant<int, kMaxRowTiles>{});
}

}  // namespace
}  // namespace lmi::cuda

using namespace lmi::cuda;

int32_t lmi_cuda_linear_quantized(const LmiLinearQuantized* args, void* stream) {
  if (args->stride % LMI_CODE_STRIDE != 0 || args->stride < args->num_inputs) {
    return fail("linear_quantized: rows of " + std::to_string(args->stride) + " codes for " +
                std::to_string(args->num_inputs) + " inputs; multiples of " +
                std::to_string(LMI_CODE_STRIDE) + " that hold them can be had");
  }
  if (!is_aligned(args->codes) || !is_aligned(args->panels) || !is_aligned(args->y)) {
    return fail("linear_quantized: codes, panels and y must start on 16 bytes");
  }
  if (args->num_rows > 16 * kMaxRowTiles) return launch_quantized_tiles(*args, stream);
  return with_codes(*args,
                    [&](auto codes) { return launch_few_rows<decltype(codes)>(*args, stream); });
}
