// Results of a sequence's pieces of keys, put together by the last block of them to end.
#pragma once

#include "cuda/attention_tile.cuh"

namespace lmi::cuda {

// Partial results whose loads are under way at a time; narrow heads leave registers to more blocks.
template <int kDim>
constexpr int kMergeParts = kDim > kNarrowHeadDim ? 8 : 4;

// Whether this block is the last of `count` that come here, which sees what the others wrote.
__device__ inline bool is_last_block(int32_t* arrivals, int count) {
  __shared__ bool is_last;
  publish_writes();
  block_barrier();
  if (threadIdx.x == 0) {
    is_last = arrive(arrivals) == count - 1;
    if (is_last) (void)atomic_add(arrivals, -count);  // for the next kernel
  }
  block_barrier();
  if (is_last) see_writes(arrivals);
  return is_last;
}

// Of a sequence's partial results for so many heads, in their order.
template <typename T, int kDim>
__device__ void merge_partials(const LmiAttention& args, const LmiAttentionWork& work,
                               int first_head, int num_heads) {
  constexpr int kQuad = 4;
  constexpr int kParts = kMergeParts<kDim>;
  const int quads = args.head_dim / kQuad;
  const int64_t first = int64_t{work.first_partial} * args.num_q_heads + first_head;
  const int64_t token = args.first_rows[work.seq];
  for (int index = static_cast<int>(threadIdx.x); index < num_heads * quads;
       index += static_cast<int>(blockDim.x)) {
    const int head = index / quads;
    const int dim = index % quads * kQuad;
    float maximum = -INFINITY;
    float mass = 0.0f;
    float result[kQuad] = {};
    for (int part = 0; part < work.num_partials; part += kParts) {
      float log_masses[kParts];
      Float4 values[kParts];
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        const bool is_there = part + i < work.num_partials;
        const int64_t at = first + int64_t{part + i} * args.num_q_heads + head;
        log_masses[i] = is_there ? load_fresh(args.log_masses + at) : -INFINITY;
        values[i] = {};
        if (is_there) {
          values[i] =
              load_fresh(reinterpret_cast<const Float4*>(args.partials + at * args.head_dim + dim));
        }
      }
      float highest = maximum;
#pragma unroll
      for (const float log_mass : log_masses) highest = max_of(highest, log_mass);
      const float fading = exp2_of(maximum - origin_of(highest));
      mass *= fading;
#pragma unroll
      for (float& number : result) number *= fading;
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        const float weight = exp2_of(log_masses[i] - origin_of(highest));
        mass += weight;
#pragma unroll
        for (int k = 0; k < kQuad; ++k) result[k] += weight * values[i].at[k];
      }
      maximum = highest;
    }
#pragma unroll
    for (float& number : result) number /= mass;
    store_as(static_cast<T*>(args.y) +
                 (token * args.num_q_heads + first_head + head) * args.head_dim + dim,
             result);
  }
}

}  // namespace lmi::cuda
