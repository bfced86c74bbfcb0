// Attention of heads over 256 dimensions, as multi-head latent attention has them: one key head for
// all query heads, and keys that are the values, too.
//
// A block takes a tile of rows, query heads token by token, and walks over their keys, of which a
// tile serves both products. Warps are pairs for 16 rows: each of a pair makes the scores of half a
// tile's keys, which the other gets by way of shared memory, and the results of half the
// dimensions, for a row's are more than a warp has registers for.
#include "cuda/latent_attention.h"

#include "cuda/attention_partials.cuh"
#include "cuda/kv_codes.cuh"

namespace lmi::cuda {
namespace {

constexpr int kDim = kMaxLatentDim;
constexpr int kPairDims = kDim / 2;  // of a warp's results
constexpr int kKeys = 32;            // of a tile
constexpr int kPairKeys = kKeys / 2;
constexpr int kRowBytes = padded_row_bytes(kDim);
constexpr int kChunks = kDim / 8;  // of a row, of 8 elements
// Of scores; so far apart that the threads that are served together use different banks.
constexpr int kScoreStride = kKeys + 8;

// Tiles of so many rows, with keys of so many tiles in shared memory.
template <int kTileRows, int kTileStages>
struct Shape {
  static constexpr int kRows = kTileRows;
  static constexpr int kStages = kTileStages;
  static constexpr int kWarps = kRows / 8;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kWarpKeys = kKeys / kWarps;  // that a warp copies
  static constexpr int kStageBytes = kKeys * kRowBytes;
  static constexpr int kScoresOffset = kRows * kRowBytes + kStages * kStageBytes;
  static constexpr int kScalesOffset = kScoresOffset + kRows * kScoreStride * 4;
  static constexpr int kSharedBytes = kScalesOffset + kStages * kKeys * 4;
};
using LargeShape = Shape<kLatentRows, 2>;
using SmallShape = Shape<kLatentRows / 2, 1>;
static_assert(SmallShape::kSharedBytes <= kNarrowHeadBytes);

struct LatentAttention : LmiAttention {
  int32_t is_decode;
  int32_t num_parts;  // blocks of a work item
};

// A block's rows and keys.
struct Part {
  int64_t first_head;  // of all tokens' query heads
  int first_row;       // of the work item's
  int num_rows;        // 0 or less: it has none
  int first_position;  // of the work item's first token
  int begin;
  int end;
};

__device__ inline Part part_of(const LatentAttention& args, const LmiAttentionWork& work,
                               int first_row, int tile_rows) {
  const int length = args.kv_lengths[work.seq];
  int64_t token = args.first_rows[work.seq];
  Part part = {0, first_row, 0, length - 1, work.begin, work.end};
  int num_tokens = work.end > work.begin ? 1 : 0;
  if (!args.is_decode) {
    token += work.begin;
    num_tokens = work.end - work.begin;
    part.first_position = length - args.num_rows[work.seq] + work.begin;
    part.begin = 0;
    part.end = part.first_position + num_tokens;
  }
  part.first_head = token * args.num_q_heads + first_row;
  part.num_rows = lower_of(num_tokens * args.num_q_heads - first_row, tile_rows);
  return part;
}

template <typename T, typename Store, typename Shape>
class LatentBlock {
 public:
  __device__ LatentBlock(const LatentAttention& args, const Part& part, int seq)
      : args_(args),
        part_(part),
        table_(args.block_tables + static_cast<int64_t>(seq) * args.table_stride) {}

  __device__ void attend() {
    read_table(0);
    start_query_copies();
    start_copies(0);
    const int num_tiles = ceil_div(part_.end - part_.begin, kKeys);
    for (int tile = 0; tile < num_tiles; ++tile) {
      wait_for_copies<0>();
      block_barrier();  // everybody's copies are there, and of two stages the other is free
      if (Shape::kStages > 1 && tile + 1 < num_tiles) start_copies(tile + 1);
      if (has_rows()) make_scores(tile);
      block_barrier();  // both halves of the scores are there
      if (has_rows()) add_values(tile);
      if (Shape::kStages == 1 && tile + 1 < num_tiles) {
        block_barrier();  // the only stage is free
        start_copies(tile + 1);
      }
    }
  }

  // By way of shared memory, where the queries were, so that rows are written in whole: with them
  // everybody was done at the last tile's scores.
  __device__ void store() const {
    if (has_rows()) {
      each_pair([&](int row, int dim, float low, float high) {
        *reinterpret_cast<uint32_t*>(shared_memory() + row * kRowBytes + dim * 2) =
            pack_pair<T>(low, high);
      });
    }
    block_barrier();
    T* y = static_cast<T*>(args_.y) + part_.first_head * args_.head_dim;
    each_chunk([&](int row, int dim) {
      if (row >= part_.num_rows || dim >= args_.head_dim) return;
      *reinterpret_cast<Word4*>(y + int64_t{row} * args_.head_dim + dim) =
          *reinterpret_cast<const Word4*>(shared_memory() + row * kRowBytes + dim * 2);
    });
  }

  // As one of the sequence's pieces; rows are heads.
  __device__ void store_partial(int partial) const {
    if (!has_rows()) return;
    const int64_t first = static_cast<int64_t>(partial) * args_.num_q_heads + part_.first_row;
    each_pair([&](int row, int dim, float low, float high) {
      if (row >= part_.num_rows || dim >= args_.head_dim) return;
      store_floats(args_.partials + (first + row) * args_.head_dim + dim, {low, high});
    });
    for (int half = 0; half < 2; ++half) {
      const int row = row_of(half);
      const float mass = group_sum(masses_[half]);
      if (pair_half() != 0 || lane_id() % 4 != 0 || row >= part_.num_rows) continue;
      args_.log_masses[first + row] = maxima_[half] * factors_[half] + log2_of(mass);
    }
  }

 private:
  __device__ static int pair_half() { return warp_id() % 2; }
  __device__ static int first_warp_row() { return warp_id() / 2 * 16; }
  __device__ static int row_of(int half) {
    return first_warp_row() + fragment_group(lane_id()) + 8 * half;
  }
  __device__ bool has_rows() const { return first_warp_row() < part_.num_rows; }

  __device__ static uint8_t* stage(int tile) {
    return shared_memory() + Shape::kRows * kRowBytes + tile % Shape::kStages * Shape::kStageBytes;
  }
  __device__ static float* scores_of(int row) {
    return reinterpret_cast<float*>(shared_memory() + Shape::kScoresOffset) + row * kScoreStride;
  }
  __device__ static float* scales_of(int tile) {
    return reinterpret_cast<float*>(shared_memory() + Shape::kScalesOffset) +
           tile % Shape::kStages * kKeys;
  }

  // Calls action(row, dim) for the thread's chunks of the tile's rows.
  template <typename Action>
  __device__ static void each_chunk(const Action& action) {
#pragma unroll 3
    for (int i = 0; i < Shape::kRows * kChunks / Shape::kThreads; ++i) {
      const int index = i * Shape::kThreads + static_cast<int>(threadIdx.x);
      action(index / kChunks, index % kChunks * 8);
    }
  }

  // Calls action(row, dim, low, high) for the lane's results, two neighbours at a time.
  template <typename Action>
  __device__ void each_pair(const Action& action) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float scale = args_.value_scale / group_sum(masses_[half]);
#pragma unroll
      for (int tile = 0; tile < kPairDims / 8; ++tile) {
        const int dim = pair_half() * kPairDims + tile * 8 + fragment_pair(lane_id());
        action(row_of(half), dim, results_[tile][2 * half] * scale,
               results_[tile][2 * half + 1] * scale);
      }
    }
  }

  __device__ void start_query_copies() const {
    const T* q = static_cast<const T*>(args_.q) + part_.first_head * args_.head_dim;
    each_chunk([&](int row, int dim) {
      const bool is_there = row < part_.num_rows && dim < args_.head_dim;
      copy_async(shared_memory() + row * kRowBytes + dim * 2,
                 q + (is_there ? int64_t{row} * args_.head_dim + dim : 0), is_there);
    });
  }

  // The key whose slot this lane finds, of those that the warp copies.
  __device__ int own_key(int tile) const {
    return part_.begin + tile * kKeys + warp_id() * Shape::kWarpKeys + lane_id() % Shape::kWarpKeys;
  }

  // Of the next tile to be copied.
  __device__ void read_table(int tile) {
    const int key = own_key(tile);
    if (key < part_.end) entry_ = table_[key / args_.block_size];
  }

  __device__ void start_copies(int tile) {
    const int slot = entry_ * args_.block_size + own_key(tile) % args_.block_size;
    const int first_row = warp_id() * Shape::kWarpKeys;
    const int num_left = part_.end - (part_.begin + tile * kKeys + first_row);
    if constexpr (std::is_same_v<Store, i8>) {
      const bool is_there = lane_id() < num_left;
      if (lane_id() < Shape::kWarpKeys) {
        copy_async<sizeof(float)>(scales_of(tile) + first_row + lane_id(),
                                  args_.key_scales + (is_there ? slot : 0), is_there);
      }
    }
#pragma unroll 3
    for (int i = 0; i < Shape::kWarpKeys * kChunks / kWarpSize; ++i) {
      const int index = i * kWarpSize + lane_id();
      const int row = index / kChunks;
      const int dim = index % kChunks * 8;
      const int row_slot = shuffle(slot, row);
      const bool is_there = row < num_left && dim < args_.head_dim;
      copy_chunk(stage(tile) + (first_row + row) * kRowBytes + dim * 2,
                 static_cast<const Store*>(args_.keys) +
                     (is_there ? static_cast<int64_t>(row_slot) * args_.head_dim + dim : 0),
                 is_there);
    }
    end_copy_group();
    read_table(tile + 1);
  }

  // Eight elements; codes are widened on the way.
  __device__ static void copy_chunk(uint8_t* target, const Store* source, bool is_there) {
    if constexpr (kIsCode<Store>) {
      Vector<uint32_t, 2> codes = {};
      if (is_there) codes = *reinterpret_cast<const Vector<uint32_t, 2>*>(source);
      Word4 wide;
      widen_in_order<T, Store>(codes.at[0], wide.at[0], wide.at[1]);
      widen_in_order<T, Store>(codes.at[1], wide.at[2], wide.at[3]);
      *reinterpret_cast<Word4*>(target) = wide;
    } else {
      copy_async(target, source, is_there);
    }
  }

  // Products of the warp's rows with its half of the tile's keys.
  __device__ void make_scores(int tile) const {
    float scores[2][4] = {};
#pragma unroll 6
    for (int step = 0; step < kDim / 16; ++step) {
      uint32_t queries[4];
      uint32_t keys[4];
      load_matrices(queries,
                    left_matrix_row(shared_memory(), kRowBytes, first_warp_row(), step * 16));
      load_matrices(keys,
                    right_matrix_row(stage(tile), kRowBytes, pair_half() * kPairKeys, step * 16));
      multiply_add<T>(scores[0], queries, keys[0], keys[1]);
      multiply_add<T>(scores[1], queries, keys[2], keys[3]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        store_floats(
            scores_of(row_of(half)) + pair_half() * kPairKeys + part * 8 + fragment_pair(lane_id()),
            {scores[part][2 * half], scores[part][2 * half + 1]});
      }
    }
  }

  // Of all the tile's keys.
  __device__ void load_scores(float (&scores)[kKeys / 8][4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int part = 0; part < kKeys / 8; ++part) {
        float pair[2];
        load_floats(scores_of(row_of(half)) + part * 8 + fragment_pair(lane_id()), pair);
        scores[part][2 * half] = pair[0];
        scores[part][2 * half + 1] = pair[1];
      }
    }
  }

  // Those that a row's token doesn't see.
  __device__ void hide(int first_key, float (&scores)[kKeys / 8][4]) const {
    if (first_key + kKeys <= lower_of(part_.end, part_.first_position + 1)) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int position =
          part_.first_position + (part_.first_row + row_of(half)) / args_.num_q_heads;
      const int num_seen = lower_of(part_.end, position + 1) - first_key;
#pragma unroll
      for (int part = 0; part < kKeys / 8; ++part) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          const int key = part * 8 + fragment_c(lane_id(), i).column;
          scores[part][i] = key < num_seen ? scores[part][i] : -INFINITY;
        }
      }
    }
  }

  // The warp's half of the dimensions of the tile's keys by their weights.
  __device__ void add_values(int tile) {
    float scores[kKeys / 8][4];
    load_scores(scores);
    if constexpr (std::is_same_v<Store, i8>) {
      multiply_by_scales(scales_of(tile), kInt8Unit, scores);
    }
    factors_[0] = factors_[1] = score_factor(args_, 1.0f);
    hide(part_.begin + tile * kKeys, scores);
    update_softmax(factors_, scores, maxima_, masses_, results_);
    if constexpr (std::is_same_v<Store, i8>) {
      multiply_by_scales(scales_of(tile), kInt8Unit, scores);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t weights[4];
      pack_weights<T>(scores[2 * half], scores[2 * half + 1], weights);
#pragma unroll
      for (int step = 0; step < kPairDims / 16; ++step) {
        uint32_t values[4];
        load_transposed(values, left_matrix_row(stage(tile), kRowBytes, half * kPairKeys,
                                                pair_half() * kPairDims + step * 16));
        multiply_add<T>(results_[2 * step], weights, values[0], values[1]);
        multiply_add<T>(results_[2 * step + 1], weights, values[2], values[3]);
      }
    }
  }

  const LatentAttention& args_;
  const Part& part_;
  const int32_t* table_;
  int entry_ = 0;
  float results_[kPairDims / 8][4] = {};
  float maxima_[2] = {-INFINITY, -INFINITY};
  float masses_[2] = {};
  float factors_[2] = {1.0f, 1.0f};
};

template <typename T, typename Store, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads)
    latent_attention_kernel(const LatentAttention args) {
  wait_for_earlier_kernels();
  const int part_id = static_cast<int>(blockIdx.x) % args.num_parts;
  const LmiAttentionWork work = args.work[static_cast<int>(blockIdx.x) / args.num_parts];
  const Part part = part_of(args, work, part_id * Shape::kRows, Shape::kRows);
  if (part.num_rows <= 0) return;
  {
    LatentBlock<T, Store, Shape> block(args, part, work.seq);
    block.attend();
    if (!args.is_decode || work.num_partials == 0) {
      block.store();
      return;
    }
    block.store_partial(work.partial);
  }
  int32_t* arrivals = args.arrivals + int64_t{work.first_partial} * args.num_q_heads + part_id;
  if (!is_last_block(arrivals, work.num_partials)) return;
  merge_partials<T, kDim>(args, work, part.first_row, part.num_rows);
}

template <typename Shape>
int32_t launch_shape(const LatentAttention& given, void* stream) {
  LatentAttention args = given;
  const int num_tokens = args.is_decode ? 1 : prefill_tile_tokens(args.num_q_heads, args.head_dim);
  args.num_parts = ceil_div(num_tokens * args.num_q_heads, Shape::kRows);
  const Grid grid = {int64_t{args.num_work} * args.num_parts};
  return with_store<bf16>(args.kv_dtype, [&](auto store) {
    return launch("latent_attention", latent_attention_kernel<bf16, decltype(store), Shape>, grid,
                  Shape::kThreads, Shape::kSharedBytes, stream, args);
  });
}

}  // namespace

int32_t launch_latent_attention(const LmiAttention& given, bool is_decode, void* stream) {
  LatentAttention args = {};
  static_cast<LmiAttention&>(args) = given;
  args.is_decode = is_decode;
  int32_t most_bytes = 0;
  if (const int32_t status = find_most_shared_bytes(&most_bytes)) return status;
  return most_bytes >= LargeShape::kSharedBytes ? launch_shape<LargeShape>(args, stream)
                                                : launch_shape<SmallShape>(args, stream);
}

}  // namespace lmi::cuda
