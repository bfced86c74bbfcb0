// How K and V of one block lie in memory on the CPU.
//
// A layer holds [num_blocks] blocks; a block holds K then V, or K alone, whose rows are the values,
// too (a latent cache):
//
//   K, bf16: [kv_heads][block/16][head_dim/2][16 tokens][2]
//   K, fp32: [kv_heads][block/16][head_dim][16 tokens]
//   V, bf16: [kv_heads][block/2][head_dim][2 tokens]
//   V, fp32: [kv_heads][block][head_dim]
//   K and V, int8: as bf16, with codes c of a byte, and behind each head's codes the scales
//                  [block] in fp32: x = scale c, c in -127 .. 127, one scale per token and head
//   K and V, e4m3 and e5m2: as bf16, with floats of a byte; one scale of K and one of V per layer
//
// so that both q.K and p.V stream as vdpbf16ps pairs.
// The token that completes no pair has a zero partner in V: writing an even token clears its odd
// neighbour, so stale memory never meets arithmetic.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace lmi {

constexpr int32_t kKeyGroup = 16;  // tokens per K group; block sizes are multiples of it

struct KvCacheView {
  uint8_t* base = nullptr;
  DType dtype = DType::kBF16;  // kF32, kBF16, kI8, kE4M3 or kE5M2
  int32_t num_layers = 0;
  int32_t num_blocks = 0;
  int32_t block_size = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;  // even
  bool is_latent = false;
  const float* fixed_scales = nullptr;  // [layers][2], of K and V; null: 1. e4m3 and e5m2

  // Bytes of K (or of V) of one head of one block, scales included.
  int64_t head_bytes() const {
    const int64_t scale_bytes = dtype == DType::kI8 ? 4 : 0;
    return block_size * (head_dim * dtype_size(dtype) + scale_bytes);
  }
  // Where the scales lie in them, int8.
  int64_t scale_offset() const { return static_cast<int64_t>(block_size) * head_dim; }
  int64_t block_bytes() const { return (is_latent ? 1 : 2) * num_kv_heads * head_bytes(); }
  int64_t layer_bytes() const { return num_blocks * block_bytes(); }
  int64_t total_bytes() const { return num_layers * layer_bytes(); }

  uint8_t* key(int32_t layer, int32_t block, int32_t head) const {
    return base + layer * layer_bytes() + block * block_bytes() + head * head_bytes();
  }
  uint8_t* value(int32_t layer, int32_t block, int32_t head) const {
    return key(layer, block, head) + num_kv_heads * head_bytes();
  }

  // Element offsets inside a head's K or V.
  int64_t key_element(int32_t token, int32_t dim) const {
    const int64_t group = token / kKeyGroup * static_cast<int64_t>(kKeyGroup) * head_dim;
    if (dtype == DType::kF32) return group + dim * kKeyGroup + token % kKeyGroup;
    return group + dim / 2 * (2 * kKeyGroup) + token % kKeyGroup * 2 + dim % 2;
  }
  int64_t value_element(int32_t token, int32_t dim) const {
    if (dtype == DType::kF32) return static_cast<int64_t>(token) * head_dim + dim;
    return static_cast<int64_t>(token / 2) * (2 * head_dim) + dim * 2 + token % 2;
  }
};

}  // namespace lmi
