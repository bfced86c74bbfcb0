// Attention of sequences with several rows: bound by the tensor cores.
//
// A block takes a tile of rows, the query heads of one KV head for some tokens, and walks their
// keys. Each warp keeps the results of its rows in registers; keys and values of the next tile are
// copied while the present one is multiplied. 8-bit codes of a tile are widened once for all warps.
#include "cuda/attention_tile.cuh"
#include "cuda/fp16_queries.cuh"
#include "cuda/kv_codes.cuh"
#include "cuda/latent_attention.h"
#include "cuda/tile_copies.cuh"

namespace lmi::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarpSize;

template <typename Store, int kDim>
struct Tile {
  static constexpr bool kHasCodes = kIsCode<Store>;
  static constexpr bool kHasScales = std::is_same_v<Store, i8>;
  static constexpr int kRows = prefill_tile_rows(kDim);
  static constexpr int kWarpRows = kRows / kWarps;
  static constexpr int kRowTiles = kWarpRows / 16;  // of a warp
  static constexpr int kKeys = kDim <= 128 ? 64 : 32;
  static constexpr int kRowBytes = padded_row_bytes(kDim);
  static constexpr int kWideBytes = 2 * kKeys * kRowBytes;  // keys and values in 16 bits
  // Copies of the cache: rows of codes, then a scale for each key and value.
  static constexpr int kStageRowBytes = kHasCodes ? kDim : kRowBytes;
  static constexpr int kScalesOffset = 2 * kKeys * kStageRowBytes;
  static constexpr int kStageBytes =
      kScalesOffset + (kHasScales ? 2 * kKeys * static_cast<int>(sizeof(float)) : 0);
  static constexpr int kSharedBytes =
      kRows * kRowBytes + 2 * kStageBytes + (kHasCodes ? kWideBytes : 0);
  static_assert(kSharedBytes <= (kDim <= kNarrowHeadDim ? kNarrowHeadBytes : kWideHeadBytes));
};

// kHasBias: some heads have slopes or sinks, which only 16-bit caches have registers for.
template <typename T, typename Store, int kDim, bool kHasBias>
class PrefillBlock {
  using Shape = Tile<Store, kDim>;
  using Key = WideKey<T, Store>;
  using Value = WideValue<T, Store>;
  static constexpr bool kHasFp16Queries = !std::is_same_v<T, Key>;
  static constexpr int kWarpKeys = Shape::kKeys / kWarps;  // that a warp copies

 public:
  __device__ PrefillBlock(const LmiAttention& args, const LmiAttentionWork& work, int kv_head)
      : args_(args),
        group_(args.num_q_heads / args.num_kv_heads),
        kv_head_(kv_head),
        first_token_(static_cast<int64_t>(args.first_rows[work.seq]) + work.begin),
        num_tokens_(work.end - work.begin),
        first_position_(args.kv_lengths[work.seq] - args.num_rows[work.seq] + work.begin),
        num_keys_(first_position_ + num_tokens_),
        first_key_(first_key_of(args.window, first_position_)),
        copies_(args, work.seq, kv_head, first_key_ + warp_id() * kWarpKeys, Shape::kKeys,
                num_keys_) {
    for (auto& maxima : maxima_) maxima[0] = maxima[1] = -INFINITY;
  }

  __device__ void attend() {
    start_query_copies();
    end_copy_group();
    start_copies(0);
    end_copy_group();
    if constexpr (kHasFp16Queries) {
      wait_for_copies<1>();
      block_barrier();
      make_queries_fp16();
    }
    const int num_tiles = ceil_div(num_keys_ - first_key_, Shape::kKeys);
    for (int tile = 0; tile < num_tiles; ++tile) {
      wait_for_copies<0>();
      block_barrier();  // everybody's copies are there, and the other stage is free
      if (tile + 1 < num_tiles) start_copies(tile + 1);
      end_copy_group();
      if constexpr (Shape::kHasCodes) {
        widen_tile(tile);
        block_barrier();
      }
      attend_tile(tile);
    }
  }

  // By way of shared memory, where the warp's queries were, so that rows are written in whole.
  __device__ void store() {
    warp_barrier();  // the warp is done with its queries
#pragma unroll
    for (int m = 0; m < Shape::kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float mass = group_sum(masses_[m][half]);
        if constexpr (kHasBias) {
          if (args_.sinks != nullptr) mass += sink_mass(m, half);
        }
        const float scale = args_.value_scale / mass;
        uint8_t* target = shared_memory() + row_of(m, half) * Shape::kRowBytes;
#pragma unroll
        for (int tile = 0; tile < kDim / 8; ++tile) {
          const int dim = tile * 8 + fragment_pair(lane_id());
          *reinterpret_cast<uint32_t*>(target + dim * 2) = pack_pair<T>(
              results_[m][tile][2 * half] * scale, results_[m][tile][2 * half + 1] * scale);
        }
      }
    }
    warp_barrier();
    constexpr int kChunks = kDim / 8;  // of a row, of 16 bytes
#pragma unroll 4
    for (int i = 0; i < Shape::kWarpRows * kChunks / kWarpSize; ++i) {
      const int index = i * kWarpSize + lane_id();
      const int row = warp_id() * Shape::kWarpRows + index / kChunks;
      const int dim = index % kChunks * 8;
      if (row >= num_tokens_ * group_ || dim >= args_.head_dim) continue;
      *reinterpret_cast<Word4*>(static_cast<T*>(args_.y) + q_offset(row) + dim) =
          *reinterpret_cast<const Word4*>(shared_memory() + row * Shape::kRowBytes + dim * 2);
    }
  }

 private:
  // Of the tile that the first key in a row's window lies in.
  __device__ static int first_key_of(int window, int first_position) {
    const int first_seen = window > 0 ? greater_of(first_position + 1 - window, 0) : 0;
    return first_seen / Shape::kKeys * Shape::kKeys;
  }

  __device__ int head_of(int row) const { return kv_head_ * group_ + row % group_; }

  // Relative to the row's maximum, as its mass is.
  __device__ float sink_mass(int m, int half) const {
    float units[2];
    find_units(m, units);
    const float maximum = maxima_[m][half] * score_factor(args_, units[half]);
    return exp2_of(args_.sinks[head_of(row_of(m, half))] * kLog2E - maximum);
  }

  // Of keys from first_key on, by their distances.
  __device__ void lower_scores(int first_key, int m, const float (&factors)[2],
                               float (&scores)[Shape::kKeys / 8][4]) const {
    float slopes[2];
    int distances[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_of(m, half);
      slopes[half] = args_.slopes[head_of(row)];
      distances[half] = first_position_ + row / group_ - first_key;
    }
    add_slopes(slopes, distances, factors, scores);
  }

  // Row of the tile: token by token the heads of the group.
  __device__ int row_of(int m, int half) const {
    return warp_id() * Shape::kWarpRows + m * 16 + fragment_group(lane_id()) + 8 * half;
  }

  __device__ int64_t q_offset(int row) const {
    const int64_t head =
        (first_token_ + row / group_) * args_.num_q_heads + kv_head_ * group_ + row % group_;
    return head * args_.head_dim;
  }

  __device__ uint8_t* stage(int tile) const {
    return shared_memory() + Shape::kRows * Shape::kRowBytes + tile % 2 * Shape::kStageBytes;
  }

  // Keys, then values, of the tile in T.
  __device__ uint8_t* wide_tile(int tile) const {
    return Shape::kHasCodes ? stage(1) + Shape::kStageBytes : stage(tile);
  }

  __device__ float* stage_scales(int tile) const {
    return reinterpret_cast<float*>(stage(tile) + Shape::kScalesOffset);
  }

  __device__ void start_query_copies() const {
    constexpr int kChunks = kDim / 8;
#pragma unroll 4
    for (int i = 0; i < Shape::kRows * kChunks / kThreads; ++i) {
      const int index = i * kThreads + static_cast<int>(threadIdx.x);
      const int row = index / kChunks;
      const int dim = index % kChunks * 8;
      const bool is_there = row < num_tokens_ * group_ && dim < args_.head_dim;
      copy_async(shared_memory() + row * Shape::kRowBytes + dim * 2,
                 static_cast<const T*>(args_.q) + (is_there ? q_offset(row) + dim : 0), is_there);
    }
  }

  // Of the next tile.
  __device__ void start_copies(int tile) {
    copies_.start(stage(tile) + warp_id() * kWarpKeys * Shape::kStageRowBytes,
                  Shape::kKeys * Shape::kStageRowBytes);
    if constexpr (Shape::kHasScales) {
      copies_.start_scales(stage_scales(tile) + warp_id() * kWarpKeys, Shape::kKeys);
    }
    copies_.advance();
  }

  // Each warp its own.
  __device__ void make_queries_fp16() const {
    static_assert(Shape::kWarpRows <= kWarpSize);
    if (lane_id() >= Shape::kWarpRows) return;
    make_row_fp16<kDim>(shared_memory() +
                        (warp_id() * Shape::kWarpRows + lane_id()) * Shape::kRowBytes);
  }

  __device__ void find_units(int m, float (&units)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      units[half] = kCodeUnit<Store>;
      if constexpr (kHasFp16Queries) {
        const uint8_t* row = shared_memory() + row_of(m, half) * Shape::kRowBytes;
        units[half] *= *reinterpret_cast<const float*>(row + 2 * kDim);
      }
    }
  }

  __device__ void widen_tile(int tile) const {
    widen_rows<Key>(stage(tile), wide_tile(tile));
    widen_rows<Value>(stage(tile) + Shape::kKeys * kDim,
                      wide_tile(tile) + Shape::kKeys * Shape::kRowBytes);
  }

  template <typename Wide>
  __device__ static void widen_rows(const uint8_t* rows, uint8_t* wide_rows) {
    constexpr int kChunks = kDim / 16;
#pragma unroll
    for (int i = 0; i < Shape::kKeys * kChunks / kThreads; ++i) {
      const int index = i * kThreads + static_cast<int>(threadIdx.x);
      const int row = index / kChunks;
      const int chunk = index % kChunks;
      const auto codes = *reinterpret_cast<const Word4*>(rows + row * kDim + chunk * 16);
      auto* target = reinterpret_cast<Word4*>(wide_rows + row * Shape::kRowBytes + chunk * 32);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Word4 words;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          widen_in_order<Wide, Store>(codes.at[2 * half + j], words.at[2 * j], words.at[2 * j + 1]);
        }
        target[half] = words;
      }
    }
  }

  __device__ void attend_tile(int tile) {
    const uint8_t* keys = wide_tile(tile);
    const uint8_t* values = keys + Shape::kKeys * Shape::kRowBytes;
    const int first_row = warp_id() * Shape::kWarpRows;
    float scores[Shape::kRowTiles][Shape::kKeys / 8][4] = {};
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      uint32_t queries[Shape::kRowTiles][4];
#pragma unroll
      for (int m = 0; m < Shape::kRowTiles; ++m) {
        load_matrices(queries[m], left_matrix_row(shared_memory(), Shape::kRowBytes,
                                                  first_row + m * 16, step * 16));
      }
#pragma unroll
      for (int n = 0; n < Shape::kKeys / 16; ++n) {
        uint32_t words[4];
        load_matrices(words, right_matrix_row(keys, Shape::kRowBytes, n * 16, step * 16));
#pragma unroll
        for (int m = 0; m < Shape::kRowTiles; ++m) {
          multiply_add<Key>(scores[m][2 * n], queries[m], words[0], words[1]);
          multiply_add<Key>(scores[m][2 * n + 1], queries[m], words[2], words[3]);
        }
      }
    }
    uint32_t weights[Shape::kRowTiles][Shape::kKeys / 16][4];
    const int first_key = first_key_ + tile * Shape::kKeys;
    const bool sees_all = first_key + Shape::kKeys - 1 <= first_position_ &&
                          (args_.window == 0 || first_key > num_keys_ - 1 - args_.window);
#pragma unroll
    for (int m = 0; m < Shape::kRowTiles; ++m) {
      if constexpr (Shape::kHasScales) {
        multiply_by_scales(stage_scales(tile), 1.0f, scores[m]);
      }
      float units[2];
      float factors[2];
      find_units(m, units);
      cap_scores(args_, units, scores[m], factors);
      if constexpr (kHasBias) {
        if (args_.slopes != nullptr) lower_scores(first_key, m, factors, scores[m]);
      }
      if (!sees_all) mask(first_key, m, scores[m]);
      update_softmax(factors, scores[m], maxima_[m], masses_[m], results_[m]);
      if constexpr (Shape::kHasScales) {
        multiply_by_scales(stage_scales(tile) + Shape::kKeys, kInt8Unit, scores[m]);
      }
#pragma unroll
      for (int n = 0; n < Shape::kKeys / 16; ++n) {
        pack_weights<Value>(scores[m][2 * n], scores[m][2 * n + 1], weights[m][n]);
      }
    }
#pragma unroll
    for (int n = 0; n < Shape::kKeys / 16; ++n) {
#pragma unroll
      for (int step = 0; step < kDim / 16; ++step) {
        uint32_t words[4];
        load_transposed(words, left_matrix_row(values, Shape::kRowBytes, n * 16, step * 16));
#pragma unroll
        for (int m = 0; m < Shape::kRowTiles; ++m) {
          multiply_add<Value>(results_[m][2 * step], weights[m][n], words[0], words[1]);
          multiply_add<Value>(results_[m][2 * step + 1], weights[m][n], words[2], words[3]);
        }
      }
    }
  }

  // Hides what lies after a row's position or before its window.
  __device__ void mask(int first_key, int m, float (&scores)[Shape::kKeys / 8][4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int position = first_position_ + row_of(m, half) / group_;
#pragma unroll
      for (int n = 0; n < Shape::kKeys / 8; ++n) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          const int distance = position - (first_key + n * 8 + fragment_c(lane_id(), i).column);
          const bool is_seen = distance >= 0 && (args_.window == 0 || distance < args_.window);
          scores[n][i] = is_seen ? scores[n][i] : -INFINITY;
        }
      }
    }
  }

  const LmiAttention& args_;
  int group_;
  int kv_head_;
  int64_t first_token_;
  int num_tokens_;
  int first_position_;
  int num_keys_;
  int first_key_;
  TileCopies<Store, kDim, kWarpKeys, Shape::kStageRowBytes> copies_;
  float results_[Shape::kRowTiles][kDim / 8][4] = {};
  float maxima_[Shape::kRowTiles][2];
  float masses_[Shape::kRowTiles][2] = {};
};

template <typename T, typename Store, int kDim, bool kHasBias>
__global__ void __launch_bounds__(kThreads) prefill_attention_kernel(const LmiAttention args) {
  wait_for_earlier_kernels();
  PrefillBlock<T, Store, kDim, kHasBias> block(args, args.work[blockIdx.y],
                                               static_cast<int>(blockIdx.x));
  block.attend();
  block.store();
}

}  // namespace
}  // namespace lmi::cuda

using namespace lmi::cuda;

int32_t lmi_cuda_prefill_attention(const LmiAttention* args, void* stream) {
  if (const int32_t status = check_attention("prefill_attention", *args); status != kOk) {
    return status;
  }
  if (args->head_dim > kMaxHeadDim) return launch_latent_attention(*args, false, stream);
  return with_head_dim(*args, [&](auto dim) {
    using T = bf16;
    constexpr int kDim = decltype(dim)::value;
    return with_store<T>(args->kv_dtype, [&](auto store) {
      using Store = decltype(store);
      const Grid grid = {args->num_kv_heads, args->num_work};
      return with_bias<T, Store>(*args, [&](auto has_bias) {
        const auto kernel = prefill_attention_kernel<T, Store, kDim, decltype(has_bias)::value>;
        return launch("prefill_attention", kernel, grid, kThreads, Tile<Store, kDim>::kSharedBytes,
                      stream, *args);
      });
    });
  });
}
