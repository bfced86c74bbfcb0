// Attention of sequences with one row: bound by the memory rate of K and V.
//
// A block takes a piece of a sequence's keys for one KV head and up to 16 of its query heads, which
// are the rows of the products. Its four warps work apart, each on every fourth 16 keys with copies
// of its own in flight, and put their results together at the end. Of the pieces of one sequence
// the last block to end puts all together, in order of position: who that is makes no difference.
#include "cuda/attention_partials.cuh"
#include "cuda/decode_tile.cuh"
#include "cuda/latent_attention.h"
#include "cuda/tile_copies.cuh"

namespace lmi::cuda {
namespace {

constexpr int kWarps = 4;
static_assert(kWarps * kWarpKeys == kSplitUnit);

template <typename T, typename Store, int kDim>
struct Memory {
  using Tile = DecodeTile<T, Store, kDim>;
  static constexpr int kStages = kDim <= 128 || kIsCode<Store> ? 3 : 2;
  static constexpr int kValuesOffset = kWarpKeys * Tile::kRowBytes;
  static constexpr int kScalesOffset = 2 * kValuesOffset;
  static constexpr int kNumScales = std::is_same_v<Store, i8> ? 2 * kWarpKeys : 0;
  static constexpr int kStageBytes = kScalesOffset + kNumScales * static_cast<int>(sizeof(float));
  static constexpr int kWarpBytes = kStages * kStageBytes;
  static constexpr int kSharedBytes = kWarps * kWarpBytes;
  // After the keys, it holds the warps' results, maxima and masses. Results of a thread are stored
  // as one; with rows so far apart the threads that are served together use different banks.
  static constexpr int kResultWidth = 2 * Tile::kResultTiles;
  static constexpr int kResultStride = round_up(kDim, 32) + 4 * kResultWidth;
  static_assert(kSharedBytes >= 4 * kWarps * kRows * (kResultStride + 2));
};

// The query heads of a block, of one KV head.
struct BlockHeads {
  int kv_head;
  int first;
  int count;
};

__device__ inline BlockHeads heads_of_block(const LmiAttention& args) {
  const int group = args.num_q_heads / args.num_kv_heads;
  const int num_parts = ceil_div(group, kRows);
  const int kv_head = static_cast<int>(blockIdx.x) / num_parts;
  const int first_in_group = static_cast<int>(blockIdx.x) % num_parts * kRows;
  return {kv_head, kv_head * group + first_in_group, lower_of(group - first_in_group, kRows)};
}

template <typename T, typename Store, int kDim, bool kHasBias>
class DecodeWarp {
  using Layout = Memory<T, Store, kDim>;
  using Tile = typename Layout::Tile;

 public:
  __device__ DecodeWarp(const LmiAttention& args, const LmiAttentionWork& work, int kv_head,
                        int first_head, int num_heads)
      : args_(args),
        begin_(work.begin + warp_id() * kWarpKeys),
        end_(work.end),
        copies_(args, work.seq, kv_head, begin_, kSplitUnit, work.end),
        stages_(shared_memory() + warp_id() * Layout::kWarpBytes) {
    const int64_t first_row =
        static_cast<int64_t>(args.first_rows[work.seq]) * args.num_q_heads + first_head;
    Tile::load_queries(static_cast<const T*>(args.q) + first_row * args.head_dim, args.head_dim,
                       num_heads, queries_, units_);
  }

  __device__ void attend() {
    int num_keys = end_ - begin_;  // from the present tile on
    int next = 0;
    for (int tile = 0; tile < Layout::kStages - 1; ++tile) {
      start_copies(next, num_keys - tile * kSplitUnit);
      next = stage_after(next);
    }
    for (int stage = 0; num_keys > 0; num_keys -= kSplitUnit) {
      start_copies(next, num_keys - (Layout::kStages - 1) * kSplitUnit);
      next = stage_after(next);
      wait_for_copies<Layout::kStages - 1>();
      warp_barrier();
      attend_tile(stages_ + stage, num_keys);
      stage = stage_after(stage);
      warp_barrier();  // before its stage is written again
    }
  }

  // results [num_heads][kResultStride], maxima and masses [num_heads]
  __device__ void store(int num_heads, float* results, float* maxima, float* masses) {
    const int lane = lane_id();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = fragment_group(lane) + 8 * half;
      const float mass = group_sum(masses_[half]);
      if (row >= num_heads) continue;
      if (lane % 4 == 0) {
        maxima[row] = maxima_[half] == -INFINITY ? -INFINITY : maxima_[half] * factors_[half];
        masses[row] = mass;
      }
#pragma unroll
      for (int tile = 0; tile < kDim / 8; tile += Tile::kResultTiles) {
        float own[Layout::kResultWidth];
#pragma unroll
        for (int i = 0; i < Layout::kResultWidth; ++i) {
          own[i] = results_[tile + i % Tile::kResultTiles][2 * half + i / Tile::kResultTiles];
        }
        store_floats(
            results + row * Layout::kResultStride + Tile::result_dim(tile, fragment_pair(lane)),
            own);
      }
    }
  }

 private:
  // Where the next stage starts, from the warp's first.
  __device__ static int stage_after(int stage) {
    const int next = stage + Layout::kStageBytes;
    return next == Layout::kWarpBytes ? 0 : next;
  }

  // Of the next tile, which has so many keys.
  __device__ void start_copies(int stage, int num_keys) {
    if (num_keys > 0) {
      copies_.start(stages_ + stage, Layout::kValuesOffset);
      if constexpr (Layout::kNumScales > 0) {
        copies_.start_scales(scales_of(stages_ + stage), kWarpKeys);
      }
      copies_.advance();
    }
    end_copy_group();
  }

  // Of the stage's keys, then of its values.
  __device__ static float* scales_of(uint8_t* stage) {
    return reinterpret_cast<float*>(stage + Layout::kScalesOffset);
  }

  __device__ void attend_tile(uint8_t* stage, int num_keys) {
    float scores[2][4] = {};
    Tile::multiply_keys(queries_, stage, scores);
    if constexpr (Layout::kNumScales > 0) multiply_by_scales(scales_of(stage), 1.0f, scores);
    cap_scores(args_, units_, scores, factors_);
    if constexpr (kHasBias) {
      if (args_.slopes != nullptr) lower_scores(num_keys, scores);
    }
    if (num_keys < kWarpKeys) {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int key = part * 8 + fragment_c(lane_id(), i).column;
          scores[part][i] = key < num_keys ? scores[part][i] : -INFINITY;
        }
      }
    }
    update_softmax(factors_, scores, maxima_, masses_, results_);
    if constexpr (Layout::kNumScales > 0) {
      multiply_by_scales(scales_of(stage) + kWarpKeys, kInt8Unit, scores);
    }
    uint32_t weights[4];
    pack_weights<typename Tile::Value>(scores[0], scores[1], weights);
    Tile::multiply_values(weights, stage + Layout::kValuesOffset, results_);
  }

  // By their keys' distances; num_keys: as attend_tile's. What few models have is worked out here,
  // so that others don't keep it.
  __device__ void lower_scores(int num_keys, float (&scores)[2][4]) const {
    const BlockHeads heads = heads_of_block(args_);
    const int position = args_.kv_lengths[args_.work[blockIdx.y].seq] - 1;
    float slopes[2];
    int distances[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = fragment_group(lane_id()) + 8 * half;
      slopes[half] = row < heads.count ? args_.slopes[heads.first + row] : 0.0f;
      distances[half] = position - (end_ - num_keys);
    }
    add_slopes(slopes, distances, factors_, scores);
  }

  const LmiAttention& args_;
  int begin_;
  int end_;
  TileCopies<Store, kDim, kWarpKeys, Tile::kRowBytes> copies_;
  uint8_t* stages_;
  uint32_t queries_[kDim / 16][4];
  float results_[kDim / 8][4] = {};
  float maxima_[2] = {-INFINITY, -INFINITY};
  float masses_[2] = {};
  float units_[2];    // of products
  float factors_[2];  // of maxima, for scores
};

template <typename T, typename Store, int kDim, bool kHasBias>
__global__ void __launch_bounds__(kWarps* kWarpSize)
    decode_attention_kernel(const LmiAttention args) {
  wait_for_earlier_kernels();
  const LmiAttentionWork work = args.work[blockIdx.y];
  if (work.begin == work.end) return;
  const auto [kv_head, first_head, num_heads] = heads_of_block(args);

  constexpr int kStride = Memory<T, Store, kDim>::kResultStride;
  float* results = reinterpret_cast<float*>(shared_memory());
  float* maxima = results + kWarps * kRows * kStride;
  float* masses = maxima + kWarps * kRows;
  {
    DecodeWarp<T, Store, kDim, kHasBias> warp(args, work, kv_head, first_head, num_heads);
    warp.attend();
    block_barrier();  // every warp is done with its keys
    warp.store(num_heads, results + warp_id() * kRows * kStride, maxima + warp_id() * kRows,
               masses + warp_id() * kRows);
  }
  block_barrier();
  for (int index = static_cast<int>(threadIdx.x); index < num_heads * args.head_dim;
       index += static_cast<int>(blockDim.x)) {
    const int row = index / args.head_dim;
    const int dim = index % args.head_dim;
    float maximum = maxima[row];
    for (int w = 1; w < kWarps; ++w) maximum = max_of(maximum, maxima[w * kRows + row]);
    float mass = 0.0f;
    if constexpr (kHasBias) {
      if (args.sinks != nullptr && work.partial == work.first_partial) {  // once of a sequence
        const float sink = args.sinks[first_head + row] * kLog2E;
        maximum = max_of(maximum, sink);
        mass = exp2_of(sink - maximum);
      }
    }
    float result = 0.0f;
    for (int w = 0; w < kWarps; ++w) {
      const float weight = exp2_of(maxima[w * kRows + row] - maximum);
      mass += weight * masses[w * kRows + row];
      result += weight * results[(w * kRows + row) * kStride + dim];
    }
    result *= args.value_scale / mass;
    const int head = first_head + row;
    if (work.num_partials == 0) {
      const int64_t token = args.first_rows[work.seq];
      static_cast<T*>(args.y)[(token * args.num_q_heads + head) * args.head_dim + dim] =
          from_float<T>(result);
    } else {
      const int64_t at = static_cast<int64_t>(work.partial) * args.num_q_heads + head;
      args.partials[at * args.head_dim + dim] = result;
      if (dim == 0) args.log_masses[at] = maximum + log2_of(mass);
    }
  }
  if (work.num_partials == 0) return;
  int32_t* arrivals = args.arrivals + int64_t{work.first_partial} * args.num_q_heads + blockIdx.x;
  if (!is_last_block(arrivals, work.num_partials)) return;
  merge_partials<T, kDim>(args, work, first_head, num_heads);
}

}  // namespace
}  // namespace lmi::cuda

using namespace lmi::cuda;

int32_t lmi_cuda_decode_attention(const LmiAttention* args, void* stream) {
  if (const int32_t status = check_attention("decode_attention", *args); status != kOk) {
    return status;
  }
  const int group = args->num_q_heads / args->num_kv_heads;
  const Grid grid = {args->num_kv_heads * ceil_div(group, kRows), args->num_work};
  if (args->head_dim > kMaxHeadDim) return launch_latent_attention(*args, true, stream);
  return with_head_dim(*args, [&](auto dim) {
    using T = bf16;
    constexpr int kDim = decltype(dim)::value;
    return with_store<T>(args->kv_dtype, [&](auto store) {
      using Store = decltype(store);
      return with_bias<T, Store>(*args, [&](auto has_bias) {
        const auto kernel = decode_attention_kernel<T, Store, kDim, decltype(has_bias)::value>;
        return launch("decode_attention", kernel, grid, kWarps * kWarpSize,
                      Memory<T, Store, kDim>::kSharedBytes, stream, *args);
      });
    });
  });
}
