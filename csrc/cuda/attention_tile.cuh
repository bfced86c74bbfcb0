// What both attention kernels share: scores and the running softmax of Milakov and
// Gimelshein, "Online normalizer calculation for softmax", 2018.
#pragma once

#include <cmath>

#include "cuda/attention_lists.h"
#include "cuda/fragment.h"
#include "cuda/launch.cuh"

namespace lmi::cuda {

constexpr float kLog2E = 1.4426950408889634f;
// Of products that make no difference any more; hidden ones, -inf, times 0 would be NaN.
constexpr float kLeastFactor = 1e-30f;

// Bytes of a row of a head in shared memory: 16 more than its elements, so that the eight rows of a
// matrix lie in different banks.
LMI_HOST_DEVICE constexpr int padded_row_bytes(int dim) { return 2 * dim + 16; }

// What makes scores to base 2 of products in multiples of `unit`, capped ones if they are to be.
__device__ inline float score_factor(const LmiAttention& args, float unit) {
  if (args.soft_cap > 0.0f) return args.soft_cap * kLog2E;
  return max_of(unit * (args.scale * kLog2E), kLeastFactor);
}

// Caps products, of rows g and g + 8 of a lane's group in multiples of `units`, if asked to.
// Factors make scores to base 2 of them; they are above 0, so that the largest product has the
// largest score.
template <int kTiles>
__device__ inline void cap_scores(const LmiAttention& args, const float (&units)[2],
                                  float (&products)[kTiles][4], float (&factors)[2]) {
  if (args.soft_cap <= 0.0f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      factors[half] = max_of(units[half] * (args.scale * kLog2E), kLeastFactor);
    }
    return;
  }
  const float steepness = args.scale / args.soft_cap;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    factors[half] = args.soft_cap * kLog2E;
#pragma unroll
    for (auto& tile : products) {
#pragma unroll
      for (int i = 2 * half; i < 2 * half + 2; ++i) {
        tile[i] = tanh_of(tile[i] * (units[half] * steepness));
      }
    }
  }
}

// Lowers products of keys by what their distances take of scores; distances are those to the tile's
// first key.
template <int kTiles>
__device__ inline void add_slopes(const float (&slopes)[2], const int (&distances)[2],
                                  const float (&factors)[2], float (&products)[kTiles][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float slope = slopes[half] * kLog2E / factors[half];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 2 * half; i < 2 * half + 2; ++i) {
        const int key = tile * 8 + fragment_c(lane_id(), i).column;
        products[tile][i] -= slope * static_cast<float>(distances[half] - key);
      }
    }
  }
}

__device__ inline float group_max(float value) {
  value = max_of(value, shuffle_xor(value, 1));
  return max_of(value, shuffle_xor(value, 2));
}

// Of a row's powers; of one that has seen no key yet, 0: that keeps -inf - -inf out of them.
__device__ inline float origin_of(float maximum) { return maximum == -INFINITY ? 0.0f : maximum; }

__device__ inline float group_sum(float value) {
  value += shuffle_xor(value, 1);
  return value + shuffle_xor(value, 2);
}

// Products [16 rows, 8 kTiles keys], scores over `factors`, become weights relative to the new
// maxima; results so far fade. A lane has rows g and g + 8 of its group; maxima are of products,
// masses of its own columns only.
template <int kTiles, int kDimTiles>
__device__ inline void update_softmax(const float (&factors)[2], float (&products)[kTiles][4],
                                      float (&maxima)[2], float (&masses)[2],
                                      float (&results)[kDimTiles][4]) {
  float highest[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float maximum = maxima[half];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      maximum = max_of(maximum, max_of(products[tile][2 * half], products[tile][2 * half + 1]));
    }
    highest[half] = group_max(maximum);
  }
  // Mostly none, once some keys are seen: others would fade by 1.
  if (any_of_warp(highest[0] > maxima[0] || highest[1] > maxima[1])) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float fading = exp2_of((maxima[half] - origin_of(highest[half])) * factors[half]);
      maxima[half] = highest[half];
      masses[half] *= fading;
#pragma unroll
      for (int tile = 0; tile < kDimTiles; ++tile) {
        results[tile][2 * half] *= fading;
        results[tile][2 * half + 1] *= fading;
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float origin = origin_of(maxima[half]) * factors[half];
    float mass = 0.0f;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 2 * half; i < 2 * half + 2; ++i) {
        products[tile][i] = exp2_of(products[tile][i] * factors[half] - origin);
        mass += products[tile][i];
      }
    }
    masses[half] += mass;
  }
}

// Of the keys of a tile, or its values, in shared memory.
template <int kTiles>
__device__ inline void multiply_by_scales(const float* scales, float unit,
                                          float (&products)[kTiles][4]) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    float pair[2];
    load_floats(scales + tile * 8 + fragment_pair(lane_id()), pair);
#pragma unroll
    for (int i = 0; i < 4; ++i) products[tile][i] *= unit * pair[i % 2];
  }
}

// Weights of 16 keys, sums of two products, as the left operand of the next.
template <typename T>
__device__ inline void pack_weights(const float (&first)[4], const float (&second)[4],
                                    uint32_t (&words)[4]) {
  words[0] = pack_pair<T>(first[0], first[1]);
  words[1] = pack_pair<T>(first[2], first[3]);
  words[2] = pack_pair<T>(second[0], second[1]);
  words[3] = pack_pair<T>(second[2], second[3]);
}

// Rows first .. first + 15 and 16 columns from `column` of a matrix in shared memory, for a left
// operand, or, transposed, for right operands of which K are the rows.
__device__ inline const uint8_t* left_matrix_row(const uint8_t* matrix, int row_bytes, int first,
                                                 int column) {
  const int lane = lane_id();
  return matrix + (first + lane % 16) * row_bytes + (column + lane / 16 * 8) * 2;
}

// The same for two right operands [16 columns, 8 rows each], of which K are the columns.
__device__ inline const uint8_t* right_matrix_row(const uint8_t* matrix, int row_bytes, int first,
                                                  int column) {
  const int lane = lane_id();
  return matrix + (first + lane / 16 * 8 + lane % 8) * row_bytes + (column + lane / 8 % 2 * 8) * 2;
}

inline int32_t check_latent_attention(const char* name, const LmiAttention& args) {
  if (args.num_kv_heads == 1 && args.keys == args.values && args.window == 0 &&
      args.soft_cap == 0.0f && args.slopes == nullptr && args.sinks == nullptr) {
    return kOk;
  }
  return fail(std::string(name) + ": heads of " + std::to_string(args.head_dim) +
              " can be had of one KV head whose keys are the values, without windows, soft caps, " +
              "slopes and sinks");
}

inline int32_t check_attention(const char* name, const LmiAttention& args) {
  const int32_t group = args.num_kv_heads > 0 ? args.num_q_heads / args.num_kv_heads : 0;
  if (group < 1 || group > max_group(args.head_dim) || args.num_q_heads % args.num_kv_heads != 0) {
    return fail(std::string(name) + ": " + std::to_string(args.num_q_heads) + " query heads for " +
                std::to_string(args.num_kv_heads) + " KV heads; at most " +
                std::to_string(max_group(args.head_dim)) + " to one");
  }
  if (args.head_dim < 8 || args.head_dim > kMaxLatentDim || args.head_dim % 8 != 0) {
    return fail(std::string(name) + ": heads of " + std::to_string(args.head_dim) +
                "; multiples of 8 up to " + std::to_string(kMaxLatentDim) + " can be had");
  }
  if (args.head_dim > kMaxHeadDim) {
    if (const int32_t status = check_latent_attention(name, args)) return status;
  }
  if (const int32_t status = check_bf16(name, args.dtype)) return status;
  const bool is_code =
      args.kv_dtype == LMI_I8 || args.kv_dtype == LMI_E4M3 || args.kv_dtype == LMI_E5M2;
  if (args.kv_dtype != args.dtype && !is_code) {
    return fail(std::string(name) + ": a cache of element type " + std::to_string(args.kv_dtype) +
                "; the queries' own, 3 (int8), 6 (e4m3) and 7 (e5m2) can be had");
  }
  if (args.kv_dtype == LMI_I8 && (args.key_scales == nullptr || args.value_scales == nullptr)) {
    return fail(std::string(name) + ": an int8 cache without scales");
  }
  if (is_code && (args.slopes != nullptr || args.sinks != nullptr)) {
    // Prefilling has no registers left for them.
    return fail(std::string(name) + ": slopes or sinks over a cache of 8 bits");
  }
  if (!(args.scale > 0.0f)) {
    return fail(std::string(name) + ": scores scaled by " + std::to_string(args.scale) +
                "; numbers above 0 can be had");
  }
  if (!is_aligned(args.q) || !is_aligned(args.keys) || !is_aligned(args.values) ||
      !is_aligned(args.y)) {
    return fail(std::string(name) + ": q, keys, values and y must start on 16 bytes");
  }
  return kOk;
}

// Calls action(number) with the head size, rounded up to one that the kernels are compiled for.
template <typename Action>
int32_t with_head_dim(const LmiAttention& args, const Action& action) {
  if (args.head_dim <= 64) return action(std::integral_constant<int, 64>{});
  if (args.head_dim <= 128) return action(std::integral_constant<int, 128>{});
  return action(std::integral_constant<int, 256>{});
}

// Calls action(std::bool_constant) with whether heads have slopes or sinks: kernels without them,
// and all of 8-bit caches, stay as they are.
template <typename T, typename Store, typename Action>
int32_t with_bias(const LmiAttention& args, const Action& action) {
  if constexpr (std::is_same_v<T, Store>) {
    return with_bool(args.slopes != nullptr || args.sinks != nullptr, action);
  } else {
    return action(std::false_type{});
  }
}

// Calls action(Store{}) with what the cache holds, checked before: T or a code.
template <typename T, typename Action>
int32_t with_store(int32_t kv_dtype, const Action& action) {
  return with_code(kv_dtype, action, [&] { return action(T{}); });
}

}  // namespace lmi::cuda
