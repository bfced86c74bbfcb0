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

// What keys and values become to meet T: codes are widened to fp16 more easily than to bf16. Values
// of int8 stay with T, for their weights are multiplied by scales, which may be too large for fp16.
template <typename T, typename Store>
using WideKey = std::conditional_t<kIsCode<Store>, f16, T>;
template <typename T, typename Store>
using WideValue = std::conditional_t<kIsCode<Store> && !std::is_same_v<Store, i8>, f16, T>;

// Two codes as a pair of T, by adding their bits to a number whose last bit is worth a 64th: fp16's
// 16, for the chosen bytes of 128 more than each, or bf16's 2, for the lower byte of each half, of
// which that can take seven bits; the sign bit, worth 128, is taken from them.
__device__ inline uint32_t widen_int8_bytes(uint32_t codes, uint32_t selector) {
  constexpr uint32_t kBase = 0x4c4c4c4c;
  constexpr uint32_t kBasePlus128 = 0x4c804c80;
  return subtract_pairs<f16>(permute_bytes(codes ^ 0x80808080u, kBase, selector), kBasePlus128);
}
__device__ inline uint32_t widen_int8_halves(uint32_t codes) {
  constexpr uint32_t kBase = 0x40004000;
  return subtract_pairs<bf16>(masked_or(codes, 0x007f007fu, kBase),
                              masked_or(codes, 0x00800080u, kBase));
}

// Codes 0 and 2 of a word as a pair of T, and codes 1 and 3: exact.
template <typename T, typename Code>
__device__ inline void widen(uint32_t codes, uint32_t& even, uint32_t& odd) {
  if constexpr (std::is_same_v<Code, i8> && std::is_same_v<T, f16>) {
    even = widen_int8_bytes(codes, 0x4240);
    odd = widen_int8_bytes(codes, 0x4341);
  } else if constexpr (std::is_same_v<Code, i8>) {
    even = widen_int8_halves(codes);
    odd = widen_int8_halves(codes >> 8);
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
  if constexpr (std::is_same_v<Code, i8> && std::is_same_v<T, f16>) {
    low = widen_int8_bytes(codes, 0x4140);
    high = widen_int8_bytes(codes, 0x4342);
  } else if constexpr (std::is_same_v<Code, i8>) {
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
