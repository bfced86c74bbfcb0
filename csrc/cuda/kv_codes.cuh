// What an 8-bit cache holds: codes, four to a word, and how they become operands of products.
#pragma once

#include <type_traits>

#include "cuda/device.cuh"

namespace lmi::cuda {

template <typename Store>
constexpr bool kIsCode = sizeof(Store) == 1;

// What widened codes are multiples of, beside the cache's scales: int8 ones become 64ths, so that
// fp16 weights, times a scale for whole codes, don't get too small.
constexpr float kInt8Unit = 64.0f;

template <typename Store>
constexpr float kCodeUnit = std::is_same_v<Store, i8> ? kInt8Unit : 1.0f;

// What operands that meet T become: fp8 is widened to fp16 more easily than to bf16. int8 stays
// with T, for weights over it are multiplied by scales, which may be too large for fp16.
template <typename T, typename Store>
using WideCode = std::conditional_t<kIsCode<Store> && !std::is_same_v<Store, i8>, f16, T>;

// A number whose last bit is worth a 64th: 2 and 16.
template <typename T>
constexpr uint32_t kInt8Base = 0;
template <>
constexpr uint32_t kInt8Base<bf16> = 0x40004000;
template <>
constexpr uint32_t kInt8Base<f16> = 0x4c004c00;

// Of the lower byte of each half: its lower seven bits less its sign bit, which is worth 128.
template <typename T>
__device__ inline uint32_t widen_int8_pair(uint32_t codes) {
  constexpr uint32_t kBase = kInt8Base<T>;
  return subtract_pairs<T>(masked_or(codes, 0x007f007fu, kBase),
                           masked_or(codes, 0x00800080u, kBase));
}

// Codes 0 and 2 of a word as a pair of T, and codes 1 and 3: exact.
template <typename T, typename Code>
__device__ inline void widen(uint32_t codes, uint32_t& even, uint32_t& odd) {
  if constexpr (std::is_same_v<Code, i8>) {
    even = widen_int8_pair<T>(codes);
    odd = widen_int8_pair<T>(codes >> 8);
  } else if constexpr (std::is_same_v<T, f16> && std::is_same_v<Code, e5m2>) {
    // The upper halves of fp16 numbers.
    even = permute_bytes(codes, 0, 0x2404);
    odd = codes & 0xff00ff00u;
  } else {
    const uint32_t sorted = permute_bytes(codes, 0, 0x3120);
    even = widen_pair<T, Code>(sorted & 0xffffu);
    odd = widen_pair<T, Code>(sorted >> 16);
  }
}

// Codes 0 and 1 of a word as a pair of T, and codes 2 and 3.
template <typename T, typename Code>
__device__ inline void widen_in_order(uint32_t codes, uint32_t& low, uint32_t& high) {
  if constexpr (std::is_same_v<Code, i8>) {
    widen<T, Code>(permute_bytes(codes, 0, 0x3120), low, high);
  } else if constexpr (std::is_same_v<T, f16> && std::is_same_v<Code, e5m2>) {
    low = permute_bytes(codes, 0, 0x1404);
    high = permute_bytes(codes, 0, 0x3424);
  } else {
    low = widen_pair<T, Code>(codes & 0xffffu);
    high = widen_pair<T, Code>(codes >> 16);
  }
}

}  // namespace lmi::cuda
