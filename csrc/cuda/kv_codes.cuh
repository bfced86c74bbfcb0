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
  return subtract_pairs<T>((codes & 0x007f007fu) | kBase, (codes & 0x00800080u) | kBase);
}

// Codes 0 and 2 of a word as a pair of T, and codes 1 and 3: exact.
template <typename T, typename Code>
__device__ inline void widen(uint32_t codes, uint32_t& even, uint32_t& odd) {
  if constexpr (std::is_same_v<Code, i8>) {
    even = widen_int8_pair<T>(codes);
    odd = widen_int8_pair<T>(codes >> 8);
  } else {
    const uint32_t sorted = permute_bytes(codes, 0, 0x3120);
    even = widen_pair<T, Code>(sorted & 0xffffu);
    odd = widen_pair<T, Code>(sorted >> 16);
  }
}

// 16 bytes of a cached head, from `dim` on, on their way into shared memory; zeros past its end and
// where there is none. A head of an odd number of 8 codes need not start on 16 bytes.
template <typename Store>
__device__ inline void copy_chunk(uint8_t* target, const Store* head, int dim, int head_dim,
                                  bool is_there) {
  const auto copy = [&](auto num_bytes, int at) {
    const bool is_valid = is_there && at < head_dim;
    uint8_t* to = target + (at - dim) * static_cast<int>(sizeof(Store));
    copy_async<decltype(num_bytes)::value>(to, head + (is_valid ? at : 0), is_valid);
  };
  if constexpr (kIsCode<Store>) {
    if (head_dim % 16 != 0) {
      copy(std::integral_constant<int, 8>{}, dim);
      copy(std::integral_constant<int, 8>{}, dim + 8);
      return;
    }
  }
  copy(std::integral_constant<int, 16>{}, dim);
}

}  // namespace lmi::cuda
