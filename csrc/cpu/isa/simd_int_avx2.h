// Integers of the vector layer for AVX2, with and without AVX-VNNI. Included by simd_int.h only.

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

static inline __m256i low_nibbles(__m256i bytes) {
  return _mm256_and_si256(bytes, _mm256_set1_epi8(0x0f));
}

#if LMI_BYTE_DOT

using HalfQuads = __m256i;
using InputQuad = __m256i;

static inline HalfQuads make_half(__m256i bytes) { return bytes; }
static inline InputQuad broadcast_quad(const void* source) {
  return _mm256_set1_epi32(load_4_bytes(source));
}
static inline __m256i dot_half(__m256i acc, HalfQuads a, InputQuad b) {
  return _mm256_dpbusd_avx_epi32(acc, a, b);
}

#else

// vpmaddubsw would saturate: bytes are widened, the even ones and the odd ones.
struct HalfQuads {
  __m256i even, odd;
};
using InputQuad = HalfQuads;

static inline HalfQuads make_half(__m256i bytes) {
  return {_mm256_and_si256(bytes, _mm256_set1_epi16(0xff)), _mm256_srli_epi16(bytes, 8)};
}
static inline InputQuad broadcast_quad(const void* source) {
  const __m256i bytes = _mm256_set1_epi32(load_4_bytes(source));
  return {_mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8), _mm256_srai_epi16(bytes, 8)};
}
static inline __m256i dot_half(__m256i acc, HalfQuads a, HalfQuads b) {
  acc = _mm256_add_epi32(acc, _mm256_madd_epi16(a.even, b.even));
  return _mm256_add_epi32(acc, _mm256_madd_epi16(a.odd, b.odd));
}

// Four bytes in 16 bits each, the even ones before the odd ones.
static inline void spread_quads(const uint8_t* source, int64_t num_quads, uint8_t* target) {
  const __m128i pairs = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
  for (int64_t i = 0; i < num_quads; i += 4) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + 4 * i));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target + 8 * i),
                        _mm256_cvtepi8_epi16(_mm_shuffle_epi8(bytes, pairs)));
  }
}
// The bytes that meet the first half of what was spread, and those that meet the second.
static inline I32x16 load_even_bytes(const void* source) {
  const __m256i low = _mm256_set1_epi16(0xff);
  return {_mm256_and_si256(load_8_ints(source, 0), low),
          _mm256_and_si256(load_8_ints(source, 1), low)};
}
static inline I32x16 load_odd_bytes(const void* source) {
  return {_mm256_srli_epi16(load_8_ints(source, 0), 8),
          _mm256_srli_epi16(load_8_ints(source, 1), 8)};
}
// The compiler would keep sums in memory and products in the registers.
static inline void add_products(I32x16& acc, I32x16 bytes, I32x16 input) {
  acc.low = _mm256_add_epi32(acc.low, _mm256_madd_epi16(bytes.low, input.low));
  acc.high = _mm256_add_epi32(acc.high, _mm256_madd_epi16(bytes.high, input.high));
  asm("" : "+x"(acc.low), "+x"(acc.high));
}

// Codes of few bits don't saturate it: twice the multiply-adds of an instruction, and nothing is
// widened until a sum of 16 bits could overflow.
constexpr int short_quads(int most_code) {
  const int most = INT16_MAX / (2 * 128 * most_code);
  return most >= 8 ? 8 : (most >= 4 ? 4 : (most >= 2 ? 2 : 0));
}
static inline I32x16 multiply_short(I32x16 codes, I32x16 input) {
  return {_mm256_maddubs_epi16(codes.low, input.low), _mm256_maddubs_epi16(codes.high, input.high)};
}
// The compiler would make a tree of such sums, whose products it writes to memory.
static inline I32x16 add_short(I32x16 a, I32x16 b) {
  __m256i low = _mm256_add_epi16(a.low, b.low), high = _mm256_add_epi16(a.high, b.high);
  asm("" : "+x"(low), "+x"(high));
  return {low, high};
}
static inline I32x16 add_pairs(I32x16 acc, I32x16 sums) {
  const __m256i ones = _mm256_set1_epi16(1);
  return {_mm256_add_epi32(acc.low, _mm256_madd_epi16(sums.low, ones)),
          _mm256_add_epi32(acc.high, _mm256_madd_epi16(sums.high, ones))};
}

#endif

struct Quads {
  HalfQuads low, high;
};

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
static inline I32x16 dot_quads(I32x16 acc, const Quads& a, InputQuad b) {
  return {dot_half(acc.low, a.low, b), dot_half(acc.high, a.high, b)};
}
