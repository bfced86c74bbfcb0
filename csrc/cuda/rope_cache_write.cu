// Rotary embedding and the write to the paged cache: one warp per token and head, bound by memory.
#include "cuda/launch.cuh"

namespace lmi::cuda {
namespace {

constexpr int kWarps = 4;

// Each dimension's partner in its rotation; past the rotary part, itself.
LMI_HOST_DEVICE inline int partner_of(int dim, int half) {
  if (dim < half) return dim + half;
  return dim < 2 * half ? dim - half : dim;
}

template <typename T, int kWidth>
__device__ void copy_head(const float* source, T* target, int head_dim) {
  for (int dim = lane_id() * kWidth; dim < head_dim; dim += kWarpSize * kWidth) {
    float x[kWidth];
    load_floats(source + dim, x);
    store_as(target + dim, x);
  }
}

template <int kWidth>
__device__ float norm_scale(const float* source, int head_dim, float eps) {
  float squares = 0.0f;
  for (int dim = lane_id() * kWidth; dim < head_dim; dim += kWarpSize * kWidth) {
    float x[kWidth];
    load_floats(source + dim, x);
    for (int i = 0; i < kWidth; ++i) squares += x[i] * x[i];
  }
  return inverse_sqrt(warp_sum(squares) / static_cast<float>(head_dim) + eps);
}

template <typename T, int kWidth>
__device__ void rotate_head(const LmiRopeCacheWrite& args, const float* source, const float* norm,
                            int position, T* target) {
  const int half = args.half_rotary;
  const float scale =
      norm == nullptr ? 1.0f : norm_scale<kWidth>(source, args.head_dim, args.norm_eps);
  const int64_t angle = static_cast<int64_t>(position) * half;
  for (int dim = lane_id() * kWidth; dim < args.head_dim; dim += kWarpSize * kWidth) {
    const int other = partner_of(dim, half);
    float x[kWidth];
    float partner[kWidth];
    load_floats(source + dim, x);
    load_floats(source + other, partner);
    if (norm != nullptr) {
      float weight[kWidth];
      load_floats(norm + dim, weight);
      for (int i = 0; i < kWidth; ++i) x[i] *= scale * weight[i];
      load_floats(norm + other, weight);
      for (int i = 0; i < kWidth; ++i) partner[i] *= scale * weight[i];
    }
    if (other != dim) {
      float cos[kWidth];
      float sin[kWidth];
      load_floats(args.cos + angle + lower_of(dim, other), cos);
      load_floats(args.sin + angle + lower_of(dim, other), sin);
      for (int i = 0; i < kWidth; ++i) {
        x[i] = x[i] * cos[i] + partner[i] * (dim < other ? -sin[i] : sin[i]);
      }
    }
    store_as(target + dim, x);
  }
}

template <typename Q, typename KV, int kWidth>
__global__ void rope_cache_write_kernel(const LmiRopeCacheWrite args) {
  const int head = static_cast<int>(blockIdx.y) * kWarps + warp_id();
  const int num_rotated = args.num_q_heads + args.num_kv_heads;
  const int num_heads = num_rotated + args.num_kv_heads;
  if (head >= num_heads) return;
  const int64_t token = blockIdx.x;
  const float* source = args.qkv + (token * num_heads + head) * args.head_dim;
  const int position = args.positions[token];
  if (head < args.num_q_heads) {
    Q* target = static_cast<Q*>(args.q) + (token * args.num_q_heads + head) * args.head_dim;
    rotate_head<Q, kWidth>(args, source, args.q_norm, position, target);
    return;
  }
  const int64_t row = static_cast<int64_t>(args.slots[token]) * args.num_kv_heads;
  if (head < num_rotated) {
    KV* target = static_cast<KV*>(args.keys) + (row + head - args.num_q_heads) * args.head_dim;
    rotate_head<KV, kWidth>(args, source, args.k_norm, position, target);
  } else {
    KV* target = static_cast<KV*>(args.values) + (row + head - num_rotated) * args.head_dim;
    copy_head<KV, kWidth>(source, target, args.head_dim);
  }
}

}  // namespace
}  // namespace lmi::cuda

using namespace lmi::cuda;

int32_t lmi_cuda_rope_cache_write(const LmiRopeCacheWrite* args, void* stream) {
  if (args->half_rotary < 0 || 2 * args->half_rotary > args->head_dim) {
    return fail("rope_cache_write: " + std::to_string(2 * args->half_rotary) +
                " rotary dimensions of a head of " + std::to_string(args->head_dim));
  }
  const bool is_wide = args->head_dim % 4 == 0 && args->half_rotary % 4 == 0;
  const int num_heads = args->num_q_heads + 2 * args->num_kv_heads;
  const Grid grid = {args->num_tokens, ceil_div(num_heads, kWarps)};
  return with_dtype("rope_cache_write", args->q_dtype, [&](auto q_element) {
    return with_dtype("rope_cache_write", args->kv_dtype, [&](auto kv_element) {
      using Q = decltype(q_element);
      using KV = decltype(kv_element);
      const auto kernel =
          is_wide ? rope_cache_write_kernel<Q, KV, 4> : rope_cache_write_kernel<Q, KV, 1>;
      return launch("rope_cache_write", kernel, grid, kWarps * kWarpSize, 0, stream, *args);
    });
  });
}
