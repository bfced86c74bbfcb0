// The thin vector layer that every CPU kernel is written over: 16 float lanes, whatever the
// instruction set. Each isa/<level>.cpp includes it once, after it defined LMI_ISA (the namespace),
// LMI_LEVEL (the enumerator), LMI_SIMD (0: any machine, 1: AVX2, 2: AVX-512, 3: NEON), and 1 for
// what the level has besides: LMI_BYTE_DOT (dot products of bytes), LMI_BF16_DOT (of bf16; on Arm
// with those of unsigned by signed bytes), LMI_AMX (Intel's matrix tiles).
//
// Everything is static and lives in the level's own namespace, so that the linker can never hand a
// function compiled for one instruction set to another. Kernels call no inline function or
// template from outside, where the same could happen.
//
// One level always gives the same bits; between levels they differ by fused roundings only.
#pragma once

#ifndef LMI_BYTE_DOT
#define LMI_BYTE_DOT 0
#endif
#ifndef LMI_BF16_DOT
#define LMI_BF16_DOT 0
#endif
#ifndef LMI_AMX
#define LMI_AMX 0
#endif

// Products of small matrices, see matrix_steps.inc.
#define LMI_MATRICES (LMI_SIMD == 3 && LMI_BF16_DOT)

#if LMI_SIMD == 3
#include <arm_neon.h>
#elif LMI_SIMD > 0
// GCC 12 takes the headers' undefined vectors for mistakes.
#pragma GCC diagnostic push
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu/kernels.h"

namespace lmi::cpu::LMI_ISA {

// Not every kernel uses every helper.
#pragma GCC diagnostic ignored "-Wunused-function"

constexpr int kLanes = 16;

using Mask = uint32_t;  // bit i: lane i

static inline Mask first_lanes(int count) { return (1u << count) - 1u; }

// How many F32x16 the registers hold: what tiles are made for.
constexpr int kVectorRegisters = LMI_SIMD == 0 ? 4 : (LMI_SIMD == 2 ? 32 : 8);

#if LMI_SIMD == 1
#include "cpu/isa/simd_avx2.h"
#elif LMI_SIMD == 2
#include "cpu/isa/simd_avx512.h"
#else
#include "cpu/isa/simd_four.h"
#if LMI_SIMD == 3
#include "cpu/isa/simd_neon.h"
#else
#include "cpu/isa/simd_scalar.h"
#endif
#endif

// The names of the layer, each defined per level above:
//   broadcast, load, store, load_partial, store_partial   (partial: lanes < count, others 0)
//   + - * /, fma(a, b, c) = a * b + c, min, max            (min, max: b where either is NaN)
//   greater(a, b) -> Mask, select(mask, a, b)              (a where the bit is set)
//   unordered(a, b) -> Mask                                (where either is NaN)
//   reduce_add, reduce_max                                 (lanes i, i + 8 first, then + 4, 2, 1)
//   load_bf16, store_bf16, load_f16, round_to_bf16         (nearest, ties to even)
//   load_pair_low, load_pair_high                          (halves of 16 bf16 pairs)
//   scale_by_power_of_2
//   Bf16Pairs, load_pairs, load_byte_pairs, broadcast_pair, dp_bf16    (see below)

static inline F32x16 zero() { return broadcast(0.0f); }

// What is there, or zeros; without a branch where loads have masks.
static inline F32x16 load_if(bool is_there, const float* source) {
#if LMI_SIMD == 2
  return load_partial(source, is_there ? kLanes : 0);
#else
  return is_there ? load(source) : zero();
#endif
}

static inline F32x16 load_bf16_partial(const bf16_t* source, int count) {
  bf16_t lanes[kLanes] = {};
  memcpy(lanes, source, sizeof(bf16_t) * count);
  return load_bf16(lanes);
}

static inline void store_bf16_partial(bf16_t* target, F32x16 x, int count) {
  bf16_t lanes[kLanes];
  store_bf16(lanes, x);
  memcpy(target, lanes, sizeof(bf16_t) * count);
}

static inline F32x16 load_f16_partial(const uint16_t* source, int count) {
  uint16_t lanes[kLanes] = {};
  memcpy(lanes, source, sizeof(uint16_t) * count);
  return load_f16(lanes);
}

// Where registers are few: the compiler would keep what was loaded from there in those that sums
// need.
static inline void load_again(const uint8_t*& source) {
  if constexpr (kVectorRegisters < 32) __asm__("" : "+r"(source));
}

#if LMI_SIMD != 1
static inline F32x16 load_pair_high_unmasked(const void* source) { return load_pair_high(source); }
#endif

static inline float widen_bf16_scalar(bf16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  memcpy(&result, &bits, sizeof(result));
  return result;
}

// e^x within 1 ulp: 0 for -inf, inf above 88.73, NaN for NaN. x = n ln 2 + r with |r| <= ln 2 / 2
// (ln 2 in two parts), e^r by a polynomial of degree 6 with minimal relative error 3e-9.
static inline F32x16 exp(F32x16 x) {
  // Outside these bounds the result is 0 or inf anyway; max and min keep their second operand if
  // it is NaN.
  x = min(broadcast(89.0f), max(broadcast(-105.0f), x));
  const F32x16 shift = broadcast(0x1.8p23f);  // adding it rounds to an integer
  const F32x16 n = fma(x, broadcast(0x1.715476p0f), shift) - shift;
  F32x16 r = fma(n, broadcast(-0x1.63p-1f), x);
  r = fma(n, broadcast(0x1.bd0106p-13f), r);
  F32x16 p = broadcast(0x1.6a2434p-10f);
  p = fma(p, r, broadcast(0x1.1239e2p-7f));
  p = fma(p, r, broadcast(0x1.5558f2p-5f));
  p = fma(p, r, broadcast(0x1.555492p-3f));
  p = fma(p, r, broadcast(0x1.fffffcp-2f));
  p = fma(p, r, broadcast(1.0f));
  p = fma(p, r, broadcast(1.0f));
  return scale_by_power_of_2(p, n);
}

// 16 pairs of bf16, the operand of dp_bf16. Levels without the instruction hold them
// widened; the others define the same names.
#if !LMI_BF16_DOT
struct Bf16Pairs {
  F32x16 low, high;
};

static inline Bf16Pairs load_pairs(const void* source) {
  return {load_pair_low(source), load_pair_high(source)};
}

// 16 pairs of signed bytes, exactly.
#if LMI_SIMD == 1
static inline __m256i widen_byte_pairs(const int8_t* source) {
  return _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
}
static inline Bf16Pairs load_byte_pairs(const int8_t* source) {
  const __m256i low = widen_byte_pairs(source), high = widen_byte_pairs(source + kLanes);
  const auto first_bytes = [](__m256i pairs) {
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(pairs, 24), 24));
  };
  const auto second_bytes = [](__m256i pairs) {
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(pairs, 8));
  };
  return {{first_bytes(low), first_bytes(high)}, {second_bytes(low), second_bytes(high)}};
}
#else
static inline Bf16Pairs load_byte_pairs(const int8_t* source) {
  float low[kLanes], high[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    low[i] = source[2 * i];
    high[i] = source[2 * i + 1];
  }
  return {load(low), load(high)};
}
#endif

// The same two neighbours for every lane.
static inline Bf16Pairs broadcast_pair(const bf16_t* source) {
  return {broadcast(widen_bf16_scalar(source[0])), broadcast(widen_bf16_scalar(source[1]))};
}

// acc[i] += a[i].low * b[i].low + a[i].high * b[i].high, in the order of the level.
static inline F32x16 dp_bf16(F32x16 acc, Bf16Pairs a, Bf16Pairs b) {
  return fma(a.high, b.high, fma(a.low, b.low, acc));
}
#endif

}  // namespace lmi::cpu::LMI_ISA
