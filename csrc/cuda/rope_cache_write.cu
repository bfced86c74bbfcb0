// Rotary embedding and the write to the paged cache: one warp per token and head, bound by memory.
#include "cuda/kv_codes.cuh"
#include "cuda/launch.cuh"

namespace lmi::cuda {
namespace {

constexpr int kWarps = 4;
constexpr float kInt8Steps = 127.0f;

// Each dimension's partner in its rotation; past the rotary part, itself.
LMI_HOST_DEVICE inline int partner_of(int dim, int half) {
  if (dim < half) return dim + half;
  return dim < 2 * half ? dim - half : dim;
}

template <int kWidth, typename X>
__device__ float norm_scale(const X* source, int head_dim, float eps) {
  float squares = 0.0f;
  for (int dim = lane_id() * kWidth; dim < head_dim; dim += kWarpSize * kWidth) {
    float x[kWidth];
    load_floats(source + dim, x);
    for (int i = 0; i < kWidth; ++i) squares += x[i] * x[i];
  }
  return inverse_sqrt(warp_sum(squares) / static_cast<float>(head_dim) + eps);
}

// Calls action(dim, values) for the lane's dimensions of the head as it is.
template <typename X, int kWidth>
struct PlainHead {
  const X* source;
  int head_dim;

  template <typename Action>
  __device__ void each(const Action& action) const {
    for (int dim = lane_id() * kWidth; dim < head_dim; dim += kWarpSize * kWidth) {
      float x[kWidth];
      load_floats(source + dim, x);
      action(dim, x);
    }
  }
};

// The same of the head after norm and rotation.
template <typename X, int kWidth>
class RotatedHead {
 public:
  __device__ RotatedHead(const LmiRopeCacheWrite& args, const X* source, const float* norm,
                         int position)
      : source_(source),
        norm_(norm),
        cos_(args.cos + static_cast<int64_t>(position) * args.half_rotary),
        sin_(args.sin + static_cast<int64_t>(position) * args.half_rotary),
        scale_(norm == nullptr ? 1.0f : norm_scale<kWidth>(source, args.head_dim, args.norm_eps)),
        head_dim_(args.head_dim),
        half_(args.half_rotary) {}

  template <typename Action>
  __device__ void each(const Action& action) const {
    for (int dim = lane_id() * kWidth; dim < head_dim_; dim += kWarpSize * kWidth) {
      const int other = partner_of(dim, half_);
      float x[kWidth];
      float partner[kWidth];
      load(dim, x);
      load(other, partner);
      if (other != dim) {
        float cos[kWidth];
        float sin[kWidth];
        load_floats(cos_ + lower_of(dim, other), cos);
        load_floats(sin_ + lower_of(dim, other), sin);
        // Nothing fused: every instance of the kernel shall round alike.
        for (int i = 0; i < kWidth; ++i) {
          const float turned = product_of(partner[i], sin[i]);
          x[i] = product_of(x[i], cos[i]) + (dim < other ? -turned : turned);
        }
      }
      action(dim, x);
    }
  }

 private:
  __device__ void load(int dim, float (&x)[kWidth]) const {
    load_floats(source_ + dim, x);
    if (norm_ == nullptr) return;
    float weight[kWidth];
    load_floats(norm_ + dim, weight);
    for (int i = 0; i < kWidth; ++i) x[i] *= scale_ * weight[i];
  }

  const X* source_;
  const float* norm_;
  const float* cos_;
  const float* sin_;
  float scale_;
  int head_dim_;
  int half_;
};

// A head of the cache, number `row` of all slots' heads. scales: of int8 codes, scale: of others.
template <typename KV, int kWidth, typename Head>
__device__ void store_in_cache(const Head& head, void* store, int64_t row, int head_dim,
                               float* scales, float scale) {
  KV* target = static_cast<KV*>(store) + row * head_dim;
  if constexpr (std::is_same_v<KV, i8>) {
    float largest = 0.0f;
    float unfit = 0.0f;  // NaN if an element isn't finite, which a maximum may pass over
    head.each([&](int, const float (&x)[kWidth]) {
      for (int i = 0; i < kWidth; ++i) {
        largest = max_of(largest, max_of(x[i], -x[i]));
        unfit += x[i] - x[i];
      }
    });
    scale = warp_max(largest) / kInt8Steps + warp_sum(unfit);
    if (lane_id() == 0) scales[row] = scale;
  }
  head.each([&](int dim, float (&x)[kWidth]) {
    if constexpr (kIsCode<KV>) {
      for (int i = 0; i < kWidth; ++i) x[i] = scale > 0.0f ? x[i] / scale : 0.0f;
    }
    store_as(target + dim, x);
  });
}

// Queries, keys and, if they aren't keys, values.
LMI_HOST_DEVICE inline int num_heads_of(const LmiRopeCacheWrite& args) {
  return args.num_q_heads + (args.values == nullptr ? 1 : 2) * args.num_kv_heads;
}

template <typename X, typename Q, typename KV, int kWidth>
__global__ void rope_cache_write_kernel(const LmiRopeCacheWrite args) {
  wait_for_earlier_kernels();
  const int head = static_cast<int>(blockIdx.y) * kWarps + warp_id();
  const int num_rotated = args.num_q_heads + args.num_kv_heads;
  const int num_heads = num_heads_of(args);
  if (head >= num_heads) return;
  const int64_t token = blockIdx.x;
  const X* source = static_cast<const X*>(args.qkv) + (token * num_heads + head) * args.head_dim;
  const int position = args.positions[token];
  if (head < args.num_q_heads) {
    Q* target = static_cast<Q*>(args.q) + (token * args.num_q_heads + head) * args.head_dim;
    RotatedHead<X, kWidth>(args, source, args.q_norm, position)
        .each([&](int dim, const float (&x)[kWidth]) { store_as(target + dim, x); });
    return;
  }
  const int64_t row = static_cast<int64_t>(args.slots[token]) * args.num_kv_heads;
  if (head < num_rotated) {
    store_in_cache<KV, kWidth>(RotatedHead<X, kWidth>(args, source, args.k_norm, position),
                               args.keys, row + head - args.num_q_heads, args.head_dim,
                               args.key_scales, args.key_scale);
  } else {
    store_in_cache<KV, kWidth>(PlainHead<X, kWidth>{source, args.head_dim}, args.values,
                               row + head - num_rotated, args.head_dim, args.value_scales,
                               args.value_scale);
  }
}

template <typename Action>
int32_t with_cache_dtype(const char* name, int32_t dtype, const Action& action) {
  return with_code(dtype, action, [&] { return with_dtype(name, dtype, action); });
}

}  // namespace
}  // namespace lmi::cuda

using namespace lmi::cuda;

int32_t lmi_cuda_rope_cache_write(const LmiRopeCacheWrite* args, void* stream) {
  if (args->half_rotary < 0 || 2 * args->half_rotary > args->head_dim) {
    return fail("rope_cache_write: " + std::to_string(2 * args->half_rotary) +
                " rotary dimensions of a head of " + std::to_string(args->head_dim));
  }
  const bool has_scales =
      args->key_scales != nullptr && (args->value_scales != nullptr || args->values == nullptr);
  if (args->kv_dtype == LMI_I8 && !has_scales) {
    return fail("rope_cache_write: an int8 cache without scales");
  }
  if (args->latent != nullptr && (args->num_kv_heads != 1 || args->values != nullptr)) {
    return fail("rope_cache_write: a latent beside values, or for " +
                std::to_string(args->num_kv_heads) + " KV heads");
  }
  if (args->latent != nullptr) {  // by a launch of its own: a choice of sources costs loads ahead
    LmiRopeCacheWrite queries = *args;
    LmiRopeCacheWrite keys = *args;
    queries.num_kv_heads = keys.num_q_heads = 0;
    keys.qkv = args->latent;
    queries.latent = keys.latent = nullptr;
    const int32_t status = lmi_cuda_rope_cache_write(&queries, stream);
    return status == kOk ? lmi_cuda_rope_cache_write(&keys, stream) : status;
  }
  const bool is_wide = args->head_dim % 4 == 0 && args->half_rotary % 4 == 0;
  const Grid grid = {args->num_tokens, ceil_div(num_heads_of(*args), kWarps)};
  return with_operands("rope_cache_write", args->qkv_dtype, args->q_dtype, [&](auto x, auto q) {
    return with_cache_dtype("rope_cache_write", args->kv_dtype, [&](auto kv) {
      using X = decltype(x);
      using Q = decltype(q);
      using KV = decltype(kv);
      const auto kernel =
          is_wide ? rope_cache_write_kernel<X, Q, KV, 4> : rope_cache_write_kernel<X, Q, KV, 1>;
      return launch("rope_cache_write", kernel, grid, kWarps * kWarpSize, 0, stream, *args);
    });
  });
}
