// A warp's tile of 16 cached keys and values, as the decode kernel multiplies it.
#pragma once

#include "cuda/attention_tile.cuh"
#include "cuda/fp16_queries.cuh"
#include "cuda/kv_codes.cuh"

namespace lmi::cuda {

constexpr int kRows = 16;      // query heads
constexpr int kWarpKeys = 16;  // that a warp takes at once

// Store is T: the operands as they lie there.
template <typename T, typename Store, int kDim>
struct DecodeTile {
  static_assert(std::is_same_v<T, Store>);
  using Value = T;
  static constexpr int kRowBytes = padded_row_bytes(kDim);

  // What element of a head a column of a tile of results is.
  LMI_HOST_DEVICE static constexpr int result_dim(int tile, int column) {
    return tile * 8 + column;
  }
  // How many tiles have neighbours for a thread, in turns.
  static constexpr int kResultTiles = 1;

  __device__ static void load_queries(const T* q, int head_dim, int num_heads,
                                      uint32_t (&queries)[kDim / 16][4], float (&units)[2]) {
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
#pragma unroll
      for (int index = 0; index < 4; ++index) {
        const Element at = fragment_a(lane_id(), index, 0);
        const int dim = step * 16 + at.column;
        const bool is_there = at.row < num_heads && dim < head_dim;
        queries[step][index] =
            is_there ? *reinterpret_cast<const uint32_t*>(q + at.row * head_dim + dim) : 0;
      }
    }
    units[0] = units[1] = 1.0f;
  }

  __device__ static void multiply_keys(const uint32_t (&queries)[kDim / 16][4], const uint8_t* keys,
                                       float (&scores)[2][4]) {
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      uint32_t words[4];
      load_matrices(words, right_matrix_row(keys, kRowBytes, 0, step * 16));
      multiply_add<T>(scores[0], queries[step], words[0], words[1]);
      multiply_add<T>(scores[1], queries[step], words[2], words[3]);
    }
  }

  __device__ static void multiply_values(const uint32_t (&weights)[4], const uint8_t* values,
                                         float (&results)[kDim / 8][4]) {
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      uint32_t words[4];
      load_transposed(words, left_matrix_row(values, kRowBytes, 0, step * 16));
      multiply_add<T>(results[2 * step], weights, words[0], words[1]);
      multiply_add<T>(results[2 * step + 1], weights, words[2], words[3]);
    }
  }
};

// 8-bit codes, which become operands in registers. Matrices are loaded as if two codes were an
// element, so that a lane gets four neighbours of a head where an operand wants two pairs eight
// apart: of 16 elements of a head, 4 c, 4 c + 2 stand for columns 2 c, 2 c + 1 of the queries, and
// 4 c + 1, 4 c + 3 for those eight further. Even elements of 16 values make one tile of results,
// odd ones the next.
template <typename T, typename Code, int kDim>
struct CodeTile {
  using Key = WideKey<T, Code>;
  using Value = WideValue<T, Code>;
  static constexpr int kRowBytes = padded_row_bytes(kDim / 2);

  LMI_HOST_DEVICE static constexpr int result_dim(int tile, int column) {
    return tile / 2 * 16 + 2 * column + tile % 2;
  }
  static constexpr int kResultTiles = 2;

  __device__ static void load_queries(const T* q, int head_dim, int num_heads,
                                      uint32_t (&queries)[kDim / 16][4], float (&units)[2]) {
    using Quad = Vector<uint32_t, 2>;
    const int lane = lane_id();
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      const int dim = step * 16 + 2 * fragment_pair(lane);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = fragment_group(lane) + 8 * half;
        Quad quad = {};
        if (row < num_heads && dim < head_dim) {
          quad = *reinterpret_cast<const Quad*>(q + row * head_dim + dim);
        }
        queries[step][half] = permute_bytes(quad.at[0], quad.at[1], 0x5410);
        queries[step][half + 2] = permute_bytes(quad.at[0], quad.at[1], 0x7632);
      }
    }
    units[0] = units[1] = kCodeUnit<Code>;
    if constexpr (!std::is_same_v<T, Key>) make_rows_fp16(queries, units);
  }

  __device__ static void multiply_keys(const uint32_t (&queries)[kDim / 16][4], const uint8_t* keys,
                                       float (&scores)[2][4]) {
#pragma unroll
    for (int step = 0; step < kDim / 16; step += 2) {
      uint32_t codes[4];
      load_matrices(codes, right_matrix_row(keys, kRowBytes, 0, step * 8));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t even;
        uint32_t odd;
        widen<Key, Code>(codes[i], even, odd);
        multiply_add<Key>(scores[i / 2], queries[step + i % 2], even, odd);
      }
    }
  }

  __device__ static void multiply_values(const uint32_t (&weights)[4], const uint8_t* values,
                                         float (&results)[kDim / 8][4]) {
#pragma unroll
    for (int step = 0; step < kDim / 16; step += 2) {
      uint32_t codes[4];
      load_transposed(codes, left_matrix_row(values, kRowBytes, 0, step * 8));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t even[2];
        uint32_t odd[2];
        widen<Value, Code>(codes[2 * half], even[0], odd[0]);
        widen<Value, Code>(codes[2 * half + 1], even[1], odd[1]);
        multiply_add<Value>(results[2 * (step + half)], weights, even[0], even[1]);
        multiply_add<Value>(results[2 * (step + half) + 1], weights, odd[0], odd[1]);
      }
    }
  }
};

template <typename T, int kDim>
struct DecodeTile<T, i8, kDim> : CodeTile<T, i8, kDim> {};
template <typename T, int kDim>
struct DecodeTile<T, e4m3, kDim> : CodeTile<T, e4m3, kDim> {};
template <typename T, int kDim>
struct DecodeTile<T, e5m2, kDim> : CodeTile<T, e5m2, kDim> {};

}  // namespace lmi::cuda
