// bf16 queries as fp16 ones, for caches whose codes become fp16 more easily than bf16. A row is in
// units of a power of two that brings its largest number near 1: what is lost is as small beside
// that as 2^-24.
#pragma once

#include "cuda/attention_tile.cuh"

namespace lmi::cuda {

struct RowUnit {
  float unit;
  float inverse;
};

// The larger of two magnitudes of bf16 numbers, `largest` and those in a word: bits without a sign
// sort as their numbers do.
__device__ inline uint32_t larger_magnitude(uint32_t largest, uint32_t word) {
  constexpr uint32_t kMagnitude = 0x7fff;
  return greater_of(largest, greater_of(word & kMagnitude, word >> 16 & kMagnitude));
}

__device__ inline RowUnit unit_of_row(uint32_t largest) {
  constexpr uint32_t kBias = 127;
  const uint32_t exponent = lower_of(greater_of(largest >> 7, 1u), 2 * kBias - 1);
  return {float_of_bits(exponent << 23), float_of_bits((2 * kBias - exponent) << 23)};
}

__device__ inline uint32_t fp16_pair(uint32_t word, float inverse) {
  const float low = to_float(bf16{static_cast<uint16_t>(word)});
  const float high = to_float(bf16{static_cast<uint16_t>(word >> 16)});
  return pack_pair<f16>(low * inverse, high * inverse);
}

// Of 16 rows as left operands: a lane has rows g and g + 8 of its group.
template <int kSteps>
__device__ inline void make_rows_fp16(uint32_t (&rows)[kSteps][4], float (&units)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) {
      largest = larger_magnitude(largest, rows[i / 2][half + i % 2 * 2]);
    }
    largest = greater_of(largest, shuffle_xor(largest, 1));
    largest = greater_of(largest, shuffle_xor(largest, 2));
    const RowUnit row = unit_of_row(largest);
    units[half] *= row.unit;
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) {
      uint32_t& word = rows[i / 2][half + i % 2 * 2];
      word = fp16_pair(word, row.inverse);
    }
  }
}

// Of a padded row in shared memory, by one thread; its unit comes after it.
template <int kDim>
__device__ inline void make_row_fp16(uint8_t* row) {
  auto* words = reinterpret_cast<Word4*>(row);
  uint32_t largest = 0;
  for (int i = 0; i < kDim / 8; ++i) {
    const Word4 four = words[i];
    for (const uint32_t word : four.at) largest = larger_magnitude(largest, word);
  }
  const RowUnit unit = unit_of_row(largest);
  for (int i = 0; i < kDim / 8; ++i) {
    Word4 four = words[i];
    for (uint32_t& word : four.at) word = fp16_pair(word, unit.inverse);
    words[i] = four;
  }
  *reinterpret_cast<float*>(row + 2 * kDim) = unit.unit;
}

}  // namespace lmi::cuda
