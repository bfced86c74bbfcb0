// Integers of the vector layer: 16 lanes of 32 bits, and products of bytes summed by fours. Every
// level gives the same, exact sums.
#pragma once

#include "cpu/isa/simd.h"

namespace lmi::cpu::LMI_ISA {

// The names, each defined per level below:
//   broadcast_int, load_int, store_int, to_float, +
//   Quads: 16 lanes of 4 unsigned bytes        load_quads; load_low_nibbles, load_high_nibbles
//   InputQuad: 4 signed bytes for every lane   broadcast_quad
//   dot_quads(acc, a, b)[i] = acc[i] + sum over j < 4 of (a[i][j] - offset) b[j], where the offset
//   is kByteOffset of load_quads and make_quads, and 0 of nibbles
//   make_quads: of 16 lanes of 32 bits; & | ^ << >> of these (>> of unsigned, shift_signed of
//   signed) look_up: bytes below 16 in a table   load_bytes, load_halves: 16 of 1 or 2 bytes,
//   widened as_float: the same bits keep_in_register: see below, no more than a hint store_bytes:
//   the lower byte of 16 whole numbers
//   of LMI_SHORT_SUMS alone: short_quads(most), so many quads of codes up to most times signed
//   bytes have sums of 16 bits, two in each lane: multiply_short of bytes, add_short of such sums,
//   add_pairs of them to sums of 32 bits
//   look_up_float: floats by the lower 4 bits of lanes   load_e4m3 (2^-8 of the numbers), load_e5m2

// What whole bytes lose where only signed ones can be multiplied: callers take it off the offset
// that the codes have anyway.
constexpr int kByteOffset = LMI_SIMD == 3 && !LMI_BF16_DOT ? 128 : 0;

// Where dot_quads() multiplies wider bytes, those of few bits are quicker as they are.
#define LMI_SHORT_SUMS (LMI_SIMD == 1 && !LMI_BYTE_DOT)
#if !LMI_SHORT_SUMS
constexpr int short_quads(int) { return 0; }
#endif

static inline int32_t load_4_bytes(const void* source) {
  int32_t bytes;
  memcpy(&bytes, source, sizeof(bytes));
  return bytes;
}

#if LMI_SIMD == 2
#include "cpu/isa/simd_int_avx512.h"
#include "cpu/isa/simd_int_x86.h"
#elif LMI_SIMD == 1
#include "cpu/isa/simd_int_avx2.h"
#include "cpu/isa/simd_int_x86.h"
#elif LMI_SIMD == 3
#include "cpu/isa/simd_int_four.h"
#include "cpu/isa/simd_int_neon.h"
#else
#include "cpu/isa/simd_int_four.h"
#include "cpu/isa/simd_int_scalar.h"
#endif

}  // namespace lmi::cpu::LMI_ISA
