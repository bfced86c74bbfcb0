// Dense matrix products of any number of rows and inputs by a plain kernel: for shapes that
// cuBLASLt has no algorithm for.
//
// A block takes 64 rows and 64 outputs, a warp a quarter of them; 32 inputs of both are in shared
// memory at a time, in rows padded so that the threads of a read find theirs in different banks.
#include "cuda/fragment.h"
#include "cuda/head_linear.cuh"
#include "cuda/launch.cuh"
#include "cuda/linear_experts.cuh"

namespace lmi::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kTile = 64;   // rows, and outputs
constexpr int kPieces = 4;  // of a row in shared memory
constexpr int kPieceInputs = 8;
constexpr int kStageInputs = kPieces * kPieceInputs;
constexpr int kWarpTile = 32;
constexpr int kRowTiles = kWarpTile / 16;
constexpr int kOutputTiles = kWarpTile / 8;
constexpr int kSharedBytes = 2 * kTile * (kPieces + 1) * 16;

template <typename T>
using Piece = Vector<T, kPieceInputs>;

// Zeros where there is nothing. kIsWide: rows start on 16 bytes, and end there.
template <bool kIsWide, typename T>
__device__ Piece<T> load_piece(const T* matrix, int row, bool is_row, int input, int num_inputs) {
  Piece<T> piece = {};
  if (!is_row || input >= num_inputs) return piece;
  const T* source = matrix + int64_t{row} * num_inputs + input;
  if constexpr (kIsWide) {
    piece = *reinterpret_cast<const Piece<T>*>(source);
  } else {
#pragma unroll
    for (int i = 0; i < kPieceInputs; ++i) {
      if (input + i < num_inputs) piece.at[i] = source[i];
    }
  }
  return piece;
}

// kHasOwnRows: where rows lie, the arguments say.
template <typename T, typename Y, bool kIsWide, bool kHasOwnRows, typename Args>
__device__ void multiply_tile(const Args& args, int first_row) {
  using Row = Piece<T>[kPieces + 1];
  Row* x = reinterpret_cast<Row*>(shared_memory());
  Row* weight = x + kTile;
  const int first_output = static_cast<int>(blockIdx.x) * kTile;
  const int lane = lane_id();
  const int warp_row = warp_id() / 2 * kWarpTile;
  const int warp_output = warp_id() % 2 * kWarpTile;
  float sums[kRowTiles][kOutputTiles][4] = {};

  for (int first = 0; first < args.num_inputs; first += kStageInputs) {
    block_barrier();  // the inputs before are no longer read
#pragma unroll
    for (int index = static_cast<int>(threadIdx.x); index < kTile * kPieces; index += kThreads) {
      const int row = index / kPieces;
      const int piece = index % kPieces;
      const int input = first + piece * kPieceInputs;
      const bool is_row = first_row + row < args.num_rows;
      const int source = is_row ? source_row<kHasOwnRows>(args, first_row + row) : 0;
      x[row][piece] = load_piece<kIsWide>(static_cast<const T*>(args.x), source, is_row, input,
                                          args.num_inputs);
      weight[row][piece] =
          load_piece<kIsWide>(static_cast<const T*>(args.weight), first_output + row,
                              first_output + row < args.num_outputs, input, args.num_inputs);
    }
    block_barrier();
#pragma unroll
    for (int piece = 0; piece < kPieces; piece += 2) {  // 16 inputs
      uint32_t rows[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        load_matrices(rows[m], &x[warp_row + m * 16 + lane % 16][piece + lane / 16]);
      }
#pragma unroll
      for (int tile = 0; tile < kOutputTiles; ++tile) {
        const auto* words = reinterpret_cast<const uint32_t*>(
            &weight[warp_output + tile * 8 + fragment_group(lane)][piece]);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          multiply_add<T>(sums[m][tile], rows[m], words[lane % 4], words[4 + lane % 4]);
        }
      }
    }
  }

#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int tile = 0; tile < kOutputTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Element at = fragment_c(lane, i);
        const int row = first_row + warp_row + m * 16 + at.row;
        const int output = first_output + warp_output + tile * 8 + at.column;
        if (row >= args.num_rows || output >= args.num_outputs) continue;
        const float bias = args.bias == nullptr ? 0.0f : args.bias[output];
        static_cast<Y*>(args.y)[int64_t{row} * args.y_stride + output] =
            from_float<Y>(sums[m][tile][i] + bias);
      }
    }
  }
}

template <typename T, typename Y, bool kIsWide>
__global__ void __launch_bounds__(kThreads) linear_tiled_kernel(const LmiLinearDense args) {
  wait_for_earlier_kernels();
  multiply_tile<T, Y, kIsWide, false>(args, static_cast<int>(blockIdx.y) * kTile);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) expert_tiles_kernel(const LmiLinearExperts args) {
  wait_for_earlier_kernels();
  ExpertProduct own(args);
  if (take_expert_tile<kTile>(own, static_cast<int>(blockIdx.y))) {
    multiply_tile<T, float, true, true>(own, 0);
  }
}

template <typename T, typename Y, bool kIsWide>
__global__ void __launch_bounds__(kThreads) head_tiles_kernel(const LmiHeadLinear args) {
  wait_for_earlier_kernels();
  const auto own = head_product<T, Y>(args, static_cast<int>(blockIdx.z));
  multiply_tile<T, Y, kIsWide, true>(own, static_cast<int>(blockIdx.y) * kTile);
}

}  // namespace

int32_t launch_expert_tiles(const LmiLinearExperts& args, void* stream) {
  const Grid grid = {ceil_div(args.num_outputs, kTile),
                     most_expert_tiles(args.num_rows, args.num_experts, kTile)};
  return launch("linear_experts", expert_tiles_kernel<bf16>, grid, kThreads, kSharedBytes, stream,
                args);
}

int32_t launch_head_tiles(const LmiHeadLinear& args, bool is_wide, void* stream) {
  const Grid grid = {ceil_div(args.num_outputs, kTile), ceil_div(args.num_rows, kTile),
                     args.num_heads};
  return with_dtype("head_linear", args.y_dtype, [&](auto element) {
    return with_bool(is_wide, [&](auto is_wide_type) {
      const auto kernel = head_tiles_kernel<bf16, decltype(element), decltype(is_wide_type)::value>;
      return launch("head_linear", kernel, grid, kThreads, kSharedBytes, stream, args);
    });
  });
}

}  // namespace lmi::cuda

using namespace lmi::cuda;

int32_t lmi_cuda_linear_tiled(const LmiLinearDense* args, void* stream) {
  const bool is_wide =
      args->num_inputs % kPieceInputs == 0 && is_aligned(args->x) && is_aligned(args->weight);
  const Grid grid = {ceil_div(args->num_outputs, kTile), ceil_div(args->num_rows, kTile)};
  if (const int32_t status = check_bf16("linear_tiled", args->dtype)) return status;
  return with_dtype("linear_tiled", args->y_dtype, [&](auto element) {
    return with_bool(is_wide, [&](auto is_wide_type) {
      const auto kernel =
          linear_tiled_kernel<bf16, decltype(element), decltype(is_wide_type)::value>;
      return launch("linear_tiled", kernel, grid, kThreads, kSharedBytes, stream, *args);
    });
  });
}
