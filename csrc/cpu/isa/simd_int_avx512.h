// Integers of the vector layer for AVX-512, with and without VNNI. Included by simd_int.h only.

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

#if LMI_BYTE_DOT

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
