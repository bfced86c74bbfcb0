// The products of linear_quantized.cu for many rows: bound by the tensor cores.
//
// A block takes 128 rows and eight panels, 128 outputs; a warp takes 64 rows and two panels. Four
// stages of 64 inputs are copied in the background, three ahead of the one that is multiplied.
// Inputs are in their own order here, and both operands' pieces of 16 bytes are swapped in shared
// memory so that the threads of a read find theirs in different banks.
#include "cuda/quantized_codes.cuh"

namespace lmi::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kRows = 128;
constexpr int kPanels = 8;
constexpr int kRowTiles = 4;  // of a warp
constexpr int kStages = 4;
constexpr int kStageInputs = 64;
constexpr int kGroupStages = kByteGroupInputs / kStageInputs;
constexpr int kStageSteps = kStageInputs / 4;
constexpr int kPieceBytes = 16;
constexpr int kRowPieces = kStageInputs / kPieceBytes;
constexpr int kPanelPieces = kStageSteps * kPanelStepBytes / kPieceBytes;
constexpr int kRowsBytes = kRows * kStageInputs;
constexpr int kStageBytes = kRowsBytes + kPanels * kPanelPieces * kPieceBytes;

// Where a stage has a row's piece, and a panel's: a piece has one step of four outputs.
__device__ inline int row_piece_offset(int row, int piece) {
  return (row * kRowPieces + (piece ^ (row / 2 % 4))) * kPieceBytes;
}
__device__ inline int panel_piece_offset(int panel, int step, int piece) {
  return kRowsBytes +
         (panel * kPanelPieces + step * 4 + (piece ^ (step / 2 % 2 * 2))) * kPieceBytes;
}

template <typename Codes, bool kIsExperts>
class QuantizedBlock {
 public:
  // first_row: of the block.
  __device__ QuantizedBlock(const LmiLinearQuantized& args, int first_row)
      : args_(args),
        num_panels_(num_panels(args.num_outputs, args.is_gated != 0)),
        num_steps_(ceil_div(args.num_inputs, 4)),
        first_row_(first_row),
        first_panel_(static_cast<int>(blockIdx.x) * kPanels) {
    if constexpr (kIsExperts) {
#pragma unroll
      for (int i = 0; i < kRowCopies; ++i) {
        const int row = (i * kThreads + static_cast<int>(threadIdx.x)) / kRowPieces;
        sources_[i] = row < args.num_rows ? source_row<kIsExperts>(args, row) : 0;
      }
    }
  }

  __device__ void multiply() {
    const int num_stages = ceil_div(args_.num_inputs, kStageInputs);
    // A panel past the last has the last one's scales; its outputs are not stored.
    const int own = first_panel_ + warp_panel() + panel_of(fragment_pair(lane_id()));
    const uint8_t* panel = panel_at<Codes>(args_, lower_of(own, num_panels_ - 1));
    for (int stage = 0; stage < kStages - 1; ++stage) start_copies(stage, stage < num_stages);
    for (int stage = 0; stage < num_stages; ++stage) {
      wait_for_copies<kStages - 2>();
      block_barrier();  // everybody's copies are there, and the stage before is free
      start_copies(stage + kStages - 1, stage + kStages - 1 < num_stages);
      multiply_stage(shared_memory() + stage % kStages * kStageBytes);
      if (stage % kGroupStages == kGroupStages - 1 || stage == num_stages - 1) {
        sums_.end_group(panel + stage / kGroupStages * int64_t{kByteGroupBytes});
      }
    }
  }

  __device__ void store() const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Element at = fragment_c(lane_id(), i);
      const int panel = first_panel_ + warp_panel() + panel_of(at.column);
      if (panel >= num_panels_) continue;
      const int lane = panel_lane_of(at.column, 0);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        const int row = first_row_ + warp_row() + m * 16 + at.row;
        if (row < args_.num_rows) store_neighbours(m, i, row, panel, lane);
      }
    }
  }

 private:
  static constexpr int kRowCopies = kRows * kRowPieces / kThreads;  // of a thread

  __device__ static int warp_row() { return warp_id() / 4 * 16 * kRowTiles; }
  __device__ static int warp_panel() { return warp_id() % 4 * kWarpPanels; }

  // Four outputs of a row, at once where all are there and start on 16 bytes.
  __device__ void store_neighbours(int m, int i, int row, int panel, int lane) const {
    float* target = args_.y + int64_t{row} * args_.num_outputs;
    const int output = panel_output(panel, lane, args_.num_outputs, args_.is_gated != 0);
    if (output < 0) return;
    const int source = source_row<kIsExperts>(args_, row);
    const int count = num_outliers<Codes>(args_, source);
    const auto finished = [&](int tile, int own) {
      const float scale = weight_scale_of<Codes>(args_, panel, lane + tile);
      const float total =
          total_of<Codes>(args_, sums_.at(m, tile, i), source, count, panel, lane + tile);
      return finish_sum(args_, total, scale, source, own);
    };
    if (args_.num_outputs % (kColumnTiles << (args_.is_gated != 0)) == 0) {
      float y[kColumnTiles];
#pragma unroll
      for (int tile = 0; tile < kColumnTiles; ++tile) y[tile] = finished(tile, output + tile);
      store_floats(target + output, y);
      return;
    }
#pragma unroll
    for (int tile = 0; tile < kColumnTiles; ++tile) {
      const int own = panel_output(panel, lane + tile, args_.num_outputs, args_.is_gated != 0);
      if (own >= 0) target[own] = finished(tile, own);
    }
  }

  // Of the stage, a group of its own; rows, panels and inputs that aren't there become zeros.
  __device__ void start_copies(int stage, bool is_there) const {
    if (is_there) {
      // Places are found for every stage anew: kept, they are too many for sums of int8.
      const int thread = unknown(static_cast<int>(threadIdx.x));
      uint8_t* target = shared_memory() + stage % kStages * kStageBytes;
#pragma unroll
      for (int i = 0; i < kRowCopies; ++i) {
        const int index = i * kThreads + thread;
        const int row = index / kRowPieces;
        const int source = kIsExperts ? sources_[i] : first_row_ + row;
        start_row_copy(target, stage, row, source, index % kRowPieces);
      }
#pragma unroll
      for (int i = 0; i < kPanels * kPanelPieces / kThreads; ++i) {
        const int index = i * kThreads + thread;
        start_panel_copy(target, stage, index / kPanelPieces, index % kPanelPieces);
      }
    }
    end_copy_group();
  }

  __device__ void start_row_copy(uint8_t* target, int stage, int row, int source, int piece) const {
    const bool is_there = first_row_ + row < args_.num_rows;
    const int64_t from = is_there ? int64_t{source} * args_.stride : 0;
    copy_async(target + row_piece_offset(row, piece),
               args_.codes + from + stage * kStageInputs + piece * kPieceBytes, is_there);
  }

  __device__ void start_panel_copy(uint8_t* target, int stage, int panel, int index) const {
    const int step = stage * kStageSteps + index / 4;
    const bool is_there = first_panel_ + panel < num_panels_ && step < num_steps_;
    const int64_t at =
        is_there ? byte_step_offset(step, Codes::kIsGrouped) + index % 4 * kPieceBytes : 0;
    const uint8_t* source = panel_at<Codes>(args_, is_there ? first_panel_ + panel : 0) + at;
    copy_async(target + panel_piece_offset(panel, index / 4, index % 4), source, is_there);
  }

  __device__ void multiply_stage(const uint8_t* stage) {
    const int lane = lane_id();
    const int column = fragment_group(lane);
    const int panel = warp_panel() + panel_of(column);
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // 32 inputs
      uint32_t rows[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        load_matrices(rows[m], stage + row_piece_offset(warp_row() + m * 16 + lane % 16,
                                                        half * 2 + lane / 16));
      }
      Word4 weights[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        weights[i] = *reinterpret_cast<const Word4*>(
            stage + panel_piece_offset(panel, half * 8 + i * 4 + lane % 4, column % 4));
      }
      sums_.multiply(rows, weights[0], weights[1]);
    }
  }

  const LmiLinearQuantized& args_;
  int num_panels_;
  int num_steps_;
  int first_row_;
  int first_panel_;
  int sources_[kIsExperts ? kRowCopies : 1];  // the rows of experts that this thread copies of
  QuantizedSums<Codes, kRowTiles> sums_;
};

template <typename Codes>
__global__ void __launch_bounds__(kThreads, Codes::kIsSummedInGroups ? 1 : 2)
    quantized_tiles_kernel(const LmiLinearQuantized args) {
  wait_for_earlier_kernels();
  QuantizedBlock<Codes, false> block(args, static_cast<int>(blockIdx.y) * kRows);
  block.multiply();
  block.store();
}

template <typename Codes>
__global__ void __launch_bounds__(kThreads, 1)
    quantized_expert_tiles_kernel(const LmiLinearQuantized args) {
  wait_for_earlier_kernels();
  LmiLinearQuantized own = args;
  if (!take_expert_tile<kRows>(own, static_cast<int>(blockIdx.y))) return;
  QuantizedBlock<Codes, true> block(own, 0);
  block.multiply();
  block.store();
}

}  // namespace

int32_t launch_quantized_tiles(const LmiLinearQuantized& args, void* stream) {
  Grid grid = {ceil_div(num_panels(args.num_outputs, args.is_gated != 0), kPanels),
               ceil_div(args.num_rows, kRows)};
  const bool is_experts = args.matrices != nullptr;
  if (is_experts) grid.y = most_expert_tiles(args.num_rows, args.num_experts, kRows);
  return with_codes(args, [&](auto codes) {
    using Codes = decltype(codes);
    auto* kernel =
        is_experts ? quantized_expert_tiles_kernel<Codes> : quantized_tiles_kernel<Codes>;
    return launch("linear_quantized_tiles", kernel, grid, kThreads, kStages * kStageBytes, stream,
                  args);
  });
}

}  // namespace lmi::cuda
