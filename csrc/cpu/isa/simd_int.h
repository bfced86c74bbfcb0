// Integers of the vector layer: 16 lanes of 32 bits, and products of bytes summed by fours. Every
// level gives the same, exact sums.
#pragma once

#include "cpu/isa/simd.h"

namespace lmi::cpu::LMI_ISA {

// The names, each defined per level below:
//   broadcast_int, load_int, store_int, to_float, +
//   Quads: 16 lanes of 4 unsigned bytes        load_quads; load_low_nibbles, load_high_nibbles
//   InputQuad: 4 signed bytes for every lane   broadcast_quad
//   dot_quads(acc, a, b)[i] = acc[i] + sum over j < 4 of a[i][j] b[j]
//   make_quads: of 16 lanes of 32 bits; & | ^ << >> of these (>> of unsigned, shift_signed of
//   signed) look_up: bytes below 16 in a table   load_bytes, load_halves: 16 of 1 or 2 bytes,
//   widened as_float: the same bits keep_in_register: see below, no more than a hint store_bytes:
//   the lower byte of 16 whole numbers
//   look_up_float: floats by the lower 4 bits of lanes   load_e4m3 (2^-8 of the numbers), load_e5m2

static inline int32_t load_4_bytes(const void* source) {
  int32_t bytes;
  memcpy(&bytes, source, sizeof(bytes));
  return bytes;
}

#if LMI_SIMD >= 2

struct I32x16 {
  __m512i v;
};

static inline I32x16 broadcast_int(int32_t value) { return {_mm512_set1_epi32(value)}; }
static inline I32x16 load_int(const void* source) { return {_mm512_loadu_si512(source)}; }
static inline void store_int(void* target, I32x16 x) { _mm512_storeu_si512(target, x.v); }
static inline F32x16 to_float(I32x16 x) { return {_mm512_cvtepi32_ps(x.v)}; }
static inline I32x16 operator+(I32x16 a, I32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }

static inline I32x16 operator&(I32x16 a, uint32_t b) {
  return {_mm512_and_si512(a.v, _mm512_set1_epi32(static_cast<int>(b)))};
}
static inline I32x16 operator|(I32x16 a, I32x16 b) { return {_mm512_or_si512(a.v, b.v)}; }
static inline I32x16 operator^(I32x16 a, uint32_t b) {
  return {_mm512_xor_si512(a.v, _mm512_set1_epi32(static_cast<int>(b)))};
}
static inline I32x16 operator>>(I32x16 a, int n) { return {(__m512i)((__v16su)a.v >> n)}; }
static inline I32x16 operator<<(I32x16 a, int n) { return {(__m512i)((__v16su)a.v << n)}; }
static inline I32x16 operator*(I32x16 a, uint32_t b) { return {(__m512i)((__v16su)a.v * b)}; }
static inline I32x16 shift_signed(I32x16 a, int n) { return {(__m512i)((__v16si)a.v >> n)}; }
static inline I32x16 look_up(const uint8_t* table, I32x16 bytes) {
  const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(entries), bytes.v)};
}
static inline I32x16 load_bytes(const uint8_t* source) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)))};
}
static inline I32x16 load_halves(const uint8_t* source) {
  return {_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)))};
}
static inline F32x16 as_float(I32x16 a) { return {_mm512_castsi512_ps(a.v)}; }
static inline F32x16 look_up_float(const float* table, I32x16 indices) {
  return {_mm512_permutexvar_ps(indices.v, _mm512_loadu_ps(table))};
}
static inline F32x16 from_halves(__m256i halves) { return {_mm512_cvtph_ps(halves)}; }

// The value is in a register here. Where it goes on to be spilled, it isn't before.
static inline void keep_in_register(I32x16& x) { __asm__("" : "+v"(x.v)); }

static inline void store_bytes(uint8_t* target, F32x16 x) {
  const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x.v));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(target), bytes);
}

static inline __m512i low_nibbles(__m512i bytes) {
  return _mm512_and_si512(bytes, _mm512_set1_epi8(0x0f));
}

#if LMI_SIMD == 3

struct Quads {
  __m512i v;
};
struct InputQuad {
  __m512i v;
};

static inline Quads make_quads(__m512i bytes) { return {bytes}; }
static inline InputQuad broadcast_quad(const void* source) {
  return {_mm512_set1_epi32(load_4_bytes(source))};
}
static inline I32x16 dot_quads(I32x16 acc, Quads a, InputQuad b) {
  return {_mm512_dpbusd_epi32(acc.v, a.v, b.v)};
}

#else

// vpmaddubsw would saturate: bytes are widened, the even ones and the odd ones.
struct Quads {
  __m512i even, odd;
};
struct InputQuad {
  __m512i even, odd;
};

static inline Quads make_quads(__m512i bytes) {
  return {_mm512_and_si512(bytes, _mm512_set1_epi16(0xff)), _mm512_srli_epi16(bytes, 8)};
}
static inline InputQuad broadcast_quad(const void* source) {
  const __m512i bytes = _mm512_set1_epi32(load_4_bytes(source));
  return {_mm512_srai_epi16(_mm512_slli_epi16(bytes, 8), 8), _mm512_srai_epi16(bytes, 8)};
}
static inline I32x16 dot_quads(I32x16 acc, Quads a, InputQuad b) {
  acc.v = _mm512_add_epi32(acc.v, _mm512_madd_epi16(a.even, b.even));
  return {_mm512_add_epi32(acc.v, _mm512_madd_epi16(a.odd, b.odd))};
}

#endif

static inline Quads make_quads(I32x16 bytes) { return make_quads(bytes.v); }
static inline Quads load_quads(const void* source) {
  return make_quads(_mm512_loadu_si512(source));
}
static inline Quads load_low_nibbles(const void* source) {
  return make_quads(low_nibbles(_mm512_loadu_si512(source)));
}
static inline Quads load_high_nibbles(const void* source) {
  return make_quads(low_nibbles(_mm512_srli_epi16(_mm512_loadu_si512(source), 4)));
}

#elif LMI_SIMD == 1

struct I32x16 {
  __m256i low, high;
};

static inline __m256i load_8_ints(const void* source, int first) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(source) + first);
}

static inline I32x16 broadcast_int(int32_t value) {
  return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)};
}
static inline I32x16 load_int(const void* source) {
  return {load_8_ints(source, 0), load_8_ints(source, 1)};
}
static inline void store_int(void* target, I32x16 x) {
  _mm256_storeu_si256(static_cast<__m256i*>(target), x.low);
  _mm256_storeu_si256(static_cast<__m256i*>(target) + 1, x.high);
}
static inline F32x16 to_float(I32x16 x) {
  return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)};
}

static inline I32x16 operator+(I32x16 a, I32x16 b) {
  return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}

static inline I32x16 operator&(I32x16 a, uint32_t b) {
  const __m256i bits = _mm256_set1_epi32(static_cast<int>(b));
  return {_mm256_and_si256(a.low, bits), _mm256_and_si256(a.high, bits)};
}
static inline I32x16 operator|(I32x16 a, I32x16 b) {
  return {_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)};
}
static inline I32x16 operator^(I32x16 a, uint32_t b) {
  const __m256i bits = _mm256_set1_epi32(static_cast<int>(b));
  return {_mm256_xor_si256(a.low, bits), _mm256_xor_si256(a.high, bits)};
}
static inline I32x16 operator>>(I32x16 a, int n) {
  return {(__m256i)((__v8su)a.low >> n), (__m256i)((__v8su)a.high >> n)};
}
static inline I32x16 operator<<(I32x16 a, int n) {
  return {(__m256i)((__v8su)a.low << n), (__m256i)((__v8su)a.high << n)};
}
static inline I32x16 operator*(I32x16 a, uint32_t b) {
  return {(__m256i)((__v8su)a.low * b), (__m256i)((__v8su)a.high * b)};
}
static inline I32x16 shift_signed(I32x16 a, int n) {
  return {(__m256i)((__v8si)a.low >> n), (__m256i)((__v8si)a.high >> n)};
}
static inline I32x16 look_up(const uint8_t* table, I32x16 bytes) {
  const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  const __m256i both = _mm256_broadcastsi128_si256(entries);
  return {_mm256_shuffle_epi8(both, bytes.low), _mm256_shuffle_epi8(both, bytes.high)};
}
static inline I32x16 load_bytes(const uint8_t* source) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
  return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
}
static inline I32x16 load_halves(const uint8_t* source) {
  const __m128i* halves = reinterpret_cast<const __m128i*>(source);
  return {_mm256_cvtepu16_epi32(_mm_loadu_si128(halves)),
          _mm256_cvtepu16_epi32(_mm_loadu_si128(halves + 1))};
}
static inline F32x16 as_float(I32x16 a) {
  return {_mm256_castsi256_ps(a.low), _mm256_castsi256_ps(a.high)};
}
// Of tables of 16, the upper half where bit 3 is set.
static inline __m256 look_up_8(__m256 first, __m256 second, __m256i indices) {
  const __m256 is_second = _mm256_castsi256_ps(_mm256_slli_epi32(indices, 28));
  return _mm256_blendv_ps(_mm256_permutevar8x32_ps(first, indices),
                          _mm256_permutevar8x32_ps(second, indices), is_second);
}
static inline F32x16 look_up_float(const float* table, I32x16 indices) {
  const __m256 first = _mm256_loadu_ps(table), second = _mm256_loadu_ps(table + 8);
  return {look_up_8(first, second, indices.low), look_up_8(first, second, indices.high)};
}
static inline F32x16 from_halves(__m256i halves) {
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
}

static inline void keep_in_register(I32x16&) {}

static inline void store_bytes(uint8_t* target, F32x16 x) {
  const __m256i byte = _mm256_set1_epi32(0xff);
  const __m256i low = _mm256_and_si256(_mm256_cvtps_epi32(x.low), byte);
  const __m256i high = _mm256_and_si256(_mm256_cvtps_epi32(x.high), byte);
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
  const __m128i bytes =
      _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(target), bytes);
}

// vpmaddubsw would saturate: bytes are widened, the even ones and the odd ones.
struct HalfQuads {
  __m256i even, odd;
};
struct Quads {
  HalfQuads low, high;
};
using InputQuad = HalfQuads;

static inline HalfQuads make_half(__m256i bytes) {
  return {_mm256_and_si256(bytes, _mm256_set1_epi16(0xff)), _mm256_srli_epi16(bytes, 8)};
}
static inline __m256i low_nibbles(__m256i bytes) {
  return _mm256_and_si256(bytes, _mm256_set1_epi8(0x0f));
}
static inline Quads make_quads(I32x16 bytes) {
  return {make_half(bytes.low), make_half(bytes.high)};
}
static inline Quads load_quads(const void* source) {
  return {make_half(load_8_ints(source, 0)), make_half(load_8_ints(source, 1))};
}
static inline Quads load_low_nibbles(const void* source) {
  return {make_half(low_nibbles(load_8_ints(source, 0))),
          make_half(low_nibbles(load_8_ints(source, 1)))};
}
static inline Quads load_high_nibbles(const void* source) {
  return {make_half(low_nibbles(_mm256_srli_epi16(load_8_ints(source, 0), 4))),
          make_half(low_nibbles(_mm256_srli_epi16(load_8_ints(source, 1), 4)))};
}
static inline InputQuad broadcast_quad(const void* source) {
  const __m256i bytes = _mm256_set1_epi32(load_4_bytes(source));
  return {_mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8), _mm256_srai_epi16(bytes, 8)};
}
static inline __m256i dot_half(__m256i acc, HalfQuads a, HalfQuads b) {
  acc = _mm256_add_epi32(acc, _mm256_madd_epi16(a.even, b.even));
  return _mm256_add_epi32(acc, _mm256_madd_epi16(a.odd, b.odd));
}
static inline I32x16 dot_quads(I32x16 acc, const Quads& a, InputQuad b) {
  return {dot_half(acc.low, a.low, b), dot_half(acc.high, a.high, b)};
}

#else

struct I32x16 {
  Ints4 v[4];
};

static inline I32x16 broadcast_int(int32_t value) {
  const Ints4 lanes = {value, value, value, value};
  return {{lanes, lanes, lanes, lanes}};
}
static inline I32x16 load_int(const void* source) {
  I32x16 result;
  __builtin_memcpy(&result, source, sizeof(result));
  return result;
}
static inline void store_int(void* target, I32x16 x) { __builtin_memcpy(target, &x, sizeof(x)); }
static inline F32x16 to_float(I32x16 x) {
  F32x16 result;
  for (int i = 0; i < 4; ++i) result.v[i] = __builtin_convertvector(x.v[i], Lanes4);
  return result;
}

static inline I32x16 operator+(I32x16 a, I32x16 b) {
  for (int i = 0; i < 4; ++i) a.v[i] += b.v[i];
  return a;
}

using Words4 = uint32_t __attribute__((vector_size(16)));
static inline I32x16 operator&(I32x16 a, uint32_t b) {
  for (int i = 0; i < 4; ++i) a.v[i] = (Ints4)((Words4)a.v[i] & b);
  return a;
}
static inline I32x16 operator|(I32x16 a, I32x16 b) {
  for (int i = 0; i < 4; ++i) a.v[i] |= b.v[i];
  return a;
}
static inline I32x16 operator^(I32x16 a, uint32_t b) {
  for (int i = 0; i < 4; ++i) a.v[i] = (Ints4)((Words4)a.v[i] ^ b);
  return a;
}
static inline I32x16 operator>>(I32x16 a, int n) {
  for (int i = 0; i < 4; ++i) a.v[i] = (Ints4)((Words4)a.v[i] >> n);
  return a;
}
static inline I32x16 operator<<(I32x16 a, int n) {
  for (int i = 0; i < 4; ++i) a.v[i] = (Ints4)((Words4)a.v[i] << n);
  return a;
}
static inline I32x16 operator*(I32x16 a, uint32_t b) {
  for (int i = 0; i < 4; ++i) a.v[i] = (Ints4)((Words4)a.v[i] * b);
  return a;
}
static inline I32x16 shift_signed(I32x16 a, int n) {
  for (int i = 0; i < 4; ++i) a.v[i] >>= n;
  return a;
}
static inline I32x16 look_up(const uint8_t* table, I32x16 bytes) {
  uint8_t entries[64];
  __builtin_memcpy(entries, &bytes, sizeof(entries));
  for (uint8_t& entry : entries) entry = table[entry];
  return load_int(entries);
}
static inline I32x16 load_bytes(const uint8_t* source) {
  int32_t lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = source[i];
  return load_int(lanes);
}
static inline I32x16 load_halves(const uint8_t* source) {
  uint16_t halves[kLanes];
  __builtin_memcpy(halves, source, sizeof(halves));
  int32_t lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = halves[i];
  return load_int(lanes);
}
static inline F32x16 as_float(I32x16 a) {
  F32x16 result;
  __builtin_memcpy(&result, &a, sizeof(result));
  return result;
}
static inline F32x16 look_up_float(const float* table, I32x16 indices) {
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = table[indices.v[i / 4][i % 4] & 15];
  return load(lanes);
}
// The linker mustn't share it.
static constexpr E4M3Table kE4M3Table;
static inline F32x16 load_e4m3(const uint8_t* source) {
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = kE4M3Table.at[source[i]] * 0x1p-8f;
  return load(lanes);
}
static inline F32x16 load_e5m2(const uint8_t* source) {
  uint16_t halves[kLanes];
  for (int i = 0; i < kLanes; ++i) halves[i] = static_cast<uint16_t>(source[i] << 8);
  return load_f16(halves);
}

static inline void keep_in_register(I32x16&) {}

static inline void store_bytes(uint8_t* target, F32x16 x) {
  for (int lane = 0; lane < kLanes; ++lane) {
    target[lane] = static_cast<uint8_t>(static_cast<int32_t>(x.v[lane / 4][lane % 4]));
  }
}

struct Quads {
  I32x16 bytes;
};
struct InputQuad {
  int32_t bytes[4];
};

static inline Quads make_quads(I32x16 bytes) { return {bytes}; }
static inline Quads load_quads(const void* source) { return {load_int(source)}; }
static inline Quads load_low_nibbles(const void* source) {
  Quads result = load_quads(source);
  for (int i = 0; i < 4; ++i) result.bytes.v[i] &= 0x0f0f0f0f;
  return result;
}
static inline Quads load_high_nibbles(const void* source) {
  Quads result = load_quads(source);
  for (int i = 0; i < 4; ++i) result.bytes.v[i] = result.bytes.v[i] >> 4 & 0x0f0f0f0f;
  return result;
}
static inline InputQuad broadcast_quad(const void* source) {
  int8_t bytes[4];
  memcpy(bytes, source, sizeof(bytes));
  return {{bytes[0], bytes[1], bytes[2], bytes[3]}};
}
static inline I32x16 dot_quads(I32x16 acc, const Quads& a, InputQuad b) {
  for (int j = 0; j < 4; ++j) {
    for (int i = 0; i < 4; ++i) acc.v[i] += (a.bytes.v[i] >> 8 * j & 0xff) * b.bytes[j];
  }
  return acc;
}

#endif

#if LMI_SIMD > 0

// NaN becomes 1.875: packing gives blocks that have one a scale of NaN.
static inline F32x16 load_e4m3(const uint8_t* source) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
  const __m256i upper = _mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8);
  const __m256i sign = _mm256_and_si256(upper, _mm256_set1_epi16(INT16_MIN));
  const __m256i magnitude = _mm256_srli_epi16(_mm256_slli_epi16(upper, 1), 2);
  return from_halves(_mm256_or_si256(sign, magnitude));
}
static inline F32x16 load_e5m2(const uint8_t* source) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
  return from_halves(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8));
}

#endif

}  // namespace lmi::cpu::LMI_ISA
