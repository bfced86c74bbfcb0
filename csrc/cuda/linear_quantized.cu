// Products of int8 or fp8 weights and rows quantised alike (W8A8), for up to 64 rows: bound by
// reading the weight once.
//
// A block takes two panels, 32 outputs; its warps take every eighth group of 128 inputs, each with
// copies of its own in flight. The bytes
// of a panel are right operands as they are: a thread reads four inputs of four neighbouring
// outputs, 16 bytes, which are its words of four tiles. Both operands may take K in any common
// order: a thread of a group of four takes 16 neighbouring inputs of 64, so that it reads rows 16
// bytes at a time.
#include "cuda/linear_unpacked.h"
#include "cuda/panel_sums.cuh"
#include "cuda/quantized_codes.cuh"

namespace lmi::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kOutputs = kSumOutputs;
static_assert(kWarpPanels * kPanelOutputs == kSumOutputs && kColumnTiles == kSumTiles);
constexpr int kStepInputs = 64;  // of which each lane of a group of four has 16
constexpr int kSteps = kByteGroupInputs / kStepInputs;
constexpr int kMaxRowTiles = 4;
constexpr int kMaxEarlyTiles = 2;  // whose rows of a group fit into registers at once

// A group of two panels in shared memory: four inputs of 16 outputs after another, then headers,
// where groups have them. The pieces of 16 bytes are swapped so that the threads that are served
// together find theirs, four steps apart, in different banks.
constexpr int kPieceBytes = 16;
constexpr int kStepPieces = kPanelStepBytes / kPieceBytes;
constexpr int kPanelBytes = kByteGroupInputs / 4 * kPanelStepBytes;
constexpr int kStages = 3;

LMI_HOST_DEVICE constexpr int staged_piece(int step, int piece) {
  return ((step * kStepPieces + piece) ^ (step / 4 % 4 * 2)) * kPieceBytes;
}

template <typename Codes>
constexpr int kStageBytes =
    kWarpPanels * (kPanelBytes + (Codes::kIsGrouped ? kPanelHeaderBytes : 0));

template <typename Codes, int kRowTiles, bool kIsExperts>
class QuantizedWarp {
 public:
  // sources: of experts, see sources_.
  __device__ explicit QuantizedWarp(const LmiLinearQuantized& args, const int* sources = nullptr)
      : args_(args),
        num_steps_(ceil_div(args.num_inputs, 4)),
        stages_(shared_memory() + warp_id() * kStages * kBytes),
        source_(near_panel(lane_id() / kCopyLanes) + copied_piece() * kPieceBytes),
        sources_(sources) {}

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
    for (int turn = 0; turn < kStages - 1; ++turn) start_copies(turn);
    for (int turn = 0; group_of(turn) < num_groups; ++turn) {
      start_copies(turn + kStages - 1);
      Rows rows[kSteps];
#pragma unroll
      for (int step = 0; step < (kRowTiles <= kMaxEarlyTiles ? kSteps : 1); ++step) {
        load_rows(turn, step, rows[step]);
      }
      wait_for_copies<kStages - 1>();
      warp_barrier();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if (kRowTiles > kMaxEarlyTiles && step > 0) load_rows(turn, step, rows[step]);
        multiply_step(stage(turn), step, rows[step]);
      }
      sums_.end_group(header(turn, panel_of(fragment_pair(lane_id()))));
      warp_barrier();  // before its stage is written again
    }
  }

  __device__ void store(typename Codes::Sum* target) const {
    store_sums<kRowTiles>(target, [&](int m, int tile, int i) { return sums_.at(m, tile, i); });
  }

 private:
  static constexpr int kBytes = kStageBytes<Codes>;
  static constexpr int kCopyLanes = kWarpSize / kWarpPanels;
  using Rows = Word4[kRowTiles][2];

  __device__ static int group_of(int turn) { return turn * kWarps + warp_id(); }
  __device__ static int copied_piece() { return lane_id() % kCopyLanes; }
  __device__ uint8_t* stage(int turn) const { return stages_ + turn % kStages * kBytes; }
  __device__ uint8_t* header(int turn, int panel) const {
    return stage(turn) + kWarpPanels * kPanelBytes + panel * kPanelHeaderBytes;
  }

  // Of the block's two. One past the last reads the last one's bytes; its outputs are not stored.
  __device__ const uint8_t* near_panel(int number) const {
    const int last = num_panels(args_.num_outputs, args_.is_gated != 0) - 1;
    const int panel = static_cast<int>(blockIdx.x) * kWarpPanels + number;
    return panel_at<Codes>(args_, lower_of(panel, last));
  }

  // Lanes 0 .. 15 copy the first panel. Past the last input is another panel, or nothing.
  __device__ void start_copies(int turn) const {
    const int first_step = group_of(turn) * (kByteGroupInputs / 4);
    if (first_step < num_steps_) {
      const int panel = lane_id() / kCopyLanes;
      const uint8_t* source = source_ + byte_step_offset(first_step, Codes::kIsGrouped);
      uint8_t* target = stage(turn) + panel * kPanelBytes;
      constexpr int kTurnSteps = kCopyLanes / kStepPieces;
#pragma unroll
      for (int step = 0; step < kByteGroupInputs / 4; step += kTurnSteps) {
        const int own = step + copied_piece() / kStepPieces;
        copy_async(target + staged_piece(own, copied_piece() % kStepPieces),
                   source + step * kPanelStepBytes, first_step + own < num_steps_);
      }
      if (Codes::kIsGrouped && copied_piece() < kPanelHeaderBytes / kPieceBytes) {
        copy_async(header(turn, panel) + copied_piece() * kPieceBytes, source - kPanelHeaderBytes,
                   true);
      }
    }
    end_copy_group();
  }

  __device__ void load_rows(int turn, int step, Rows& rows) const {
    const int input =
        group_of(turn) * kByteGroupInputs + step * kStepInputs + lane_id() % 4 * (kStepInputs / 4);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = m * 16 + half * 8 + fragment_group(lane_id());
        rows[m][half] = load_codes(row, kIsExperts ? sources_[row] : row, input);
      }
    }
  }

  // Of 16 inputs of this thread.
  __device__ void multiply_step(const uint8_t* stage, int step, const Rows& rows) {
    const int column = fragment_group(lane_id());
    const int first = step * (kStepInputs / 4) + lane_id() % 4 * 4;
    Word4 weights[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      weights[i] = *reinterpret_cast<const Word4*>(stage + panel_of(column) * kPanelBytes +
                                                   staged_piece(first + i, column % 4));
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

  // Past the last input are zeros.
  __device__ Word4 load_codes(int row, int source, int input) const {
    if (row >= args_.num_rows) return {};
    return *reinterpret_cast<const Word4*>(args_.codes + int64_t{source} * args_.stride + input);
  }

  const LmiLinearQuantized& args_;
  int num_steps_;
  uint8_t* stages_;
  const uint8_t* source_;
  const int* sources_;  // in shared memory, since registers have no room: the row of x of each
  QuantizedSums<Codes, kRowTiles> sums_;
};

// Copies of the weight, then sums.
template <typename Codes, int kRowTiles>
constexpr int kSharedBytes =
    greater_of(kWarps * kStages * kStageBytes<Codes>,
               kWarps * 16 * kRowTiles * kSumStride * static_cast<int>(sizeof(float)));

template <typename Codes, int kRowTiles, bool kIsExperts>
__device__ void finish_few_rows(const LmiLinearQuantized& args,
                                QuantizedWarp<Codes, kRowTiles, kIsExperts>& warp) {
  using Sum = typename Codes::Sum;
  constexpr int kRows = 16 * kRowTiles;
  Sum* partials = reinterpret_cast<Sum*>(shared_memory());
  warp.multiply();
  block_barrier();  // every warp is done with its copies
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
    const int source = source_row<kIsExperts>(args, row);
    const int count = num_outliers<Codes>(args, source);
    const float total = total_of<Codes>(args, sum, source, count, panel, lane);
    args.y[int64_t{row} * args.num_outputs + output] =
        finish_sum(args, total, scale, source, output);
  }
}

template <typename Codes, int kRowTiles>
__global__ void __launch_bounds__(kThreads) linear_quantized_kernel(const LmiLinearQuantized args) {
  QuantizedWarp<Codes, kRowTiles, false> warp(args);
  warp.prefetch_weights();
  wait_for_earlier_kernels();
  finish_few_rows(args, warp);
}

template <typename Codes, int kRowTiles>
__global__ void __launch_bounds__(kThreads)
    quantized_expert_rows_kernel(const LmiLinearQuantized args) {
  wait_for_earlier_kernels();
  LmiLinearQuantized own = args;
  if (!take_expert_tile<16 * kRowTiles>(own, static_cast<int>(blockIdx.y))) return;
  __shared__ int sources[16 * kRowTiles];
  const int row = static_cast<int>(threadIdx.x);
  if (row < 16 * kRowTiles) sources[row] = row < own.num_rows ? source_row<true>(own, row) : 0;
  block_barrier();
  QuantizedWarp<Codes, kRowTiles, true> warp(own, sources);
  finish_few_rows(own, warp);
}

template <typename Codes>
int32_t launch_few_rows(const LmiLinearQuantized& args, int num_rows, void* stream) {
  const auto run = [&](auto row_tiles) {
    constexpr int kRowTiles = decltype(row_tiles)::value;
    Grid grid = {ceil_div(num_panels(args.num_outputs, args.is_gated != 0), kWarpPanels)};
    auto* kernel = linear_quantized_kernel<Codes, kRowTiles>;
    if (args.matrices != nullptr) {
      grid.y = most_expert_tiles(args.num_rows, args.num_experts, 16 * kRowTiles);
      kernel = quantized_expert_rows_kernel<Codes, kRowTiles>;
    }
    return launch("linear_quantized", kernel, grid, kThreads, kSharedBytes<Codes, kRowTiles>,
                  stream, args);
  };
  if (num_rows == 0) return kOk;
  if (num_rows <= 16) return run(std::integral_constant<int, 1>{});
  if (num_rows <= 32) return run(std::integral_constant<int, 2>{});
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
  if (is_unpacked(*args)) return launch_linear_unpacked(*args, stream);
  // Of an expert on average, where rows are experts': its tiles should be as full.
  const int num_rows =
      args->matrices == nullptr ? args->num_rows : 2 * ceil_div(args->num_rows, args->num_experts);
  if (num_rows > 16 * kMaxRowTiles) return launch_quantized_tiles(*args, stream);
  return with_codes(
      *args, [&](auto codes) { return launch_few_rows<decltype(codes)>(*args, num_rows, stream); });
}
