// Matrix products over int4 weights, activations in 16 bits (W4A16), of up to 16 rows: bound by
// reading the weight once. More rows are those of linear_packed_tiles.cu; many unpack the weight
// for good: linear_unpacked.cu.
//
// A block takes two panels, 32 outputs; each of its warps takes a class of stretches of 128 inputs
// (packed_products.cuh), with copies of its own in flight. What bounds the kernel beside memory is
// the number of its instructions, of which unpacking takes most.
#include "cuda/expert_tile.cuh"
#include "cuda/linear_unpacked.h"
#include "cuda/packed_products.cuh"
#include "cuda/panel_sums.cuh"

namespace lmi::cuda {
namespace {

constexpr int kWarps = kClasses;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kOutputs = kSumOutputs;
static_assert(kWarpPanels * kPanelOutputs == kOutputs);
constexpr int kStages = 3;
constexpr int kStageBytes = kWarpPanels * kStretchBytes;
constexpr int kWarpBytes = kStages * kStageBytes;

// kRowTiles: of 8 rows.
template <typename T, int kRowTiles, bool kIsExperts, int kGroup>
class PackedWarp {
 public:
  __device__ explicit PackedWarp(const LmiLinearPacked& args)
      : args_(args),
        stretch_bytes_(static_cast<int>(panel_bytes(kStretchInputs, args.group_size))),
        panel_bytes_(static_cast<int>(panel_bytes(args.num_inputs, args.group_size))),
        stages_(shared_memory() + warp_id() * kWarpBytes),
        products_(args.group_size) {
    // Lanes 0 .. 15 copy the first panel. A panel past the last copies the last one's bytes; its
    // outputs are not stored.
    const int panel = static_cast<int>(blockIdx.x) * kWarpPanels + lane_id() / kCopyLanes;
    const int64_t index = lower_of(panel, num_panels(args.num_outputs, args.is_gated != 0) - 1);
    source_ = static_cast<const uint8_t*>(args.panels) + index * panel_bytes_ + copied_byte();
    // A row past the last is the last one again.
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      const int row = lower_of(fragment_group(lane_id()) + 8 * n, args.num_rows - 1);
      rows_[n] = static_cast<const T*>(args.x) +
                 int64_t{source_row<kIsExperts>(args, row)} * args.num_inputs +
                 stretch_of(0) * kStretchInputs + lane_id() % 4 * 8;
    }
  }

  // What the first copies will take; no kernel writes weights.
  __device__ void prefetch_weights() const {
    const uint8_t* panel = source_ - copied_byte();
    const int at = lane_id() % kCopyLanes * kPrefetchBytes;
#pragma unroll
    for (int turn = 0; turn < kStages - 1; ++turn) {
      const int begin = stretch_of(turn) * stretch_bytes_;
      if (at < lower_of(stretch_bytes_, panel_bytes_ - begin)) prefetch(panel + begin + at);
    }
  }

  __device__ void multiply() {
    const int num_stretches = ceil_div(args_.num_inputs, kStretchInputs);
    for (int turn = 0; turn < kStages - 1; ++turn) start_copies(turn);
    for (int turn = 0; stretch_of(turn) < num_stretches; ++turn) {
      start_copies(turn + kStages - 1);
      const int first_input = stretch_of(turn) * kStretchInputs;
      Word4 rows[kSteps][kRowTiles];
      load_rows(first_input, rows);
      wait_for_copies<kStages - 1>();
      warp_barrier();
      products_.multiply(stage(turn), first_input, args_.num_inputs,
                         [&](int step, int n) { return rows[step][n]; });
      warp_barrier();  // before its stage is written again
    }
  }

  // target: [8 rows kRowTiles][kSumStride]. A thread's four outputs are neighbours.
  __device__ void store(float* target) const {
    const int output = Products::own_panel() * kPanelOutputs + Products::own_output();
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float own[Products::kQuad];
#pragma unroll
        for (int j = 0; j < Products::kQuad; ++j) own[j] = products_.at(n, i, j);
        store_floats(target + sum_offset(n * 8 + fragment_pair(lane_id()) + i, output), own);
      }
    }
  }

 private:
  using Products = PackedProducts<T, kRowTiles, kGroup>;
  static constexpr int kCopyLanes = kWarpSize / kWarpPanels;
  static_assert(kCopyLanes * kPrefetchBytes >= kStretchBytes);

  __device__ static int stretch_of(int turn) { return turn * kWarps + warp_id(); }
  __device__ static int copied_byte() { return lane_id() % kCopyLanes * kChunkBytes; }
  __device__ uint8_t* stage(int turn) const { return stages_ + turn % kStages * kStageBytes; }

  __device__ void start_copies(int turn) const {
    const int begin = stretch_of(turn) * stretch_bytes_;
    const int num_bytes = lower_of(stretch_bytes_, panel_bytes_ - begin);
    if (num_bytes > 0) {
      const int lane = lane_id() % kCopyLanes;
      uint8_t* target =
          stage(turn) + lane_id() / kCopyLanes * kStretchBytes + staged_chunk(lane / 4, lane % 4);
#pragma unroll
      for (int at = 0; at < kStretchBytes; at += kCopyLanes * kChunkBytes) {
        copy_async(target + at, source_ + begin + at, at + copied_byte() < num_bytes);
      }
    }
    end_copy_group();
  }

  // Of a stretch, before its weights are there; then the next one's are next.
  __device__ void load_rows(int first_input, Word4 (&rows)[kSteps][kRowTiles]) {
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int at = step * kStepInputs;
        const bool is_there = first_input + at + lane_id() % 4 * 8 < args_.num_inputs;
        rows[step][n] = is_there ? *reinterpret_cast<const Word4*>(rows_[n] + at) : Word4{};
      }
      rows_[n] += kWarps * kStretchInputs;
    }
  }

  const LmiLinearPacked& args_;
  int stretch_bytes_;
  int panel_bytes_;
  uint8_t* stages_;
  const uint8_t* source_;
  const T* rows_[kRowTiles];
  Products products_;
};

// Copies of the weight, then sums.
template <int kRowTiles>
constexpr int kSharedBytes = greater_of(
    kWarps * kWarpBytes, kWarps * 8 * kRowTiles * kSumStride * static_cast<int>(sizeof(float)));

template <typename T, int kRowTiles, bool kIsExperts, int kGroup>
__device__ void finish_few_rows(const LmiLinearPacked& args,
                                PackedWarp<T, kRowTiles, kIsExperts, kGroup>& warp) {
  constexpr int kRows = 8 * kRowTiles;
  float* partials = reinterpret_cast<float*>(shared_memory());
  warp.multiply();
  block_barrier();  // every warp is done with its copies
  warp.store(partials + warp_id() * kRows * kSumStride);
  block_barrier();
  for (int index = static_cast<int>(threadIdx.x); index < kRows * kOutputs; index += kThreads) {
    const int row = index / kOutputs;
    const int lane = index % kOutputs;
    const int panel = static_cast<int>(blockIdx.x) * kWarpPanels + lane / kPanelOutputs;
    const int output =
        panel_output(panel, lane % kPanelOutputs, args.num_outputs, args.is_gated != 0);
    if (row >= args.num_rows || output < 0) continue;
    const float bias = args.bias == nullptr ? 0.0f : args.bias[output];
    args.y[static_cast<int64_t>(row) * args.num_outputs + output] =
        sum_of_warps<kWarps>(partials, kRows, sum_offset(row, lane), bias);
  }
}

template <typename T, int kRowTiles, int kGroup>
__global__ void __launch_bounds__(kThreads) linear_packed_kernel(const LmiLinearPacked args) {
  PackedWarp<T, kRowTiles, false, kGroup> warp(args);
  warp.prefetch_weights();
  wait_for_earlier_kernels();
  finish_few_rows(args, warp);
}

template <typename T, int kRowTiles, int kGroup>
__global__ void __launch_bounds__(kThreads) packed_expert_rows_kernel(const LmiLinearPacked args) {
  wait_for_earlier_kernels();
  LmiLinearPacked own = args;
  if (!take_expert_tile<8 * kRowTiles>(own, static_cast<int>(blockIdx.y))) return;
  PackedWarp<T, kRowTiles, true, kGroup> warp(own);
  finish_few_rows(own, warp);
}

template <int kRowTiles, int kGroup>
int32_t launch_few_rows(const LmiLinearPacked& args, void* stream) {
  const int panels = num_panels(args.num_outputs, args.is_gated != 0);
  Grid grid = {args.num_rows == 0 ? 0 : ceil_div(panels, kWarpPanels)};
  auto* kernel = linear_packed_kernel<bf16, kRowTiles, kGroup>;
  if (args.matrices != nullptr) {
    grid.y = most_expert_tiles(args.num_rows, args.num_experts, 8 * kRowTiles);
    kernel = packed_expert_rows_kernel<bf16, kRowTiles, kGroup>;
  }
  return launch("linear_packed", kernel, grid, kThreads, kSharedBytes<kRowTiles>, stream, args);
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
  if (const int32_t status = check_bf16("linear_packed", args->dtype)) return status;
  if (is_unpacked(*args)) return launch_linear_unpacked(*args, stream);
  // Of an expert on average, where rows are experts': its tiles should be as full.
  const int num_rows =
      args->matrices == nullptr ? args->num_rows : 2 * ceil_div(args->num_rows, args->num_experts);
  if (num_rows > kMaxFewPackedRows) return launch_packed_tiles(*args, stream);
  return with_group(*args, [&](auto known) {
    constexpr int kGroup = decltype(known)::value;
    return num_rows <= 8 ? launch_few_rows<1, kGroup>(*args, stream)
                         : launch_few_rows<kMaxFewPackedRows / 8, kGroup>(*args, stream);
  });
}
