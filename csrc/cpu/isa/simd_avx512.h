// Vector layer for AVX-512 (F, BW, DQ, VL): one 16-lane register. Included by simd.h only.

struct F32x16 {
  __m512 v;
};

static inline F32x16 broadcast(float value) { return {_mm512_set1_ps(value)}; }

static inline F32x16 load(const float* source) { return {_mm512_loadu_ps(source)}; }

static inline void store(float* target, F32x16 x) { _mm512_storeu_ps(target, x.v); }

static inline F32x16 operator+(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }

static inline F32x16 operator-(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }

static inline F32x16 operator*(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }

static inline F32x16 operator/(F32x16 a, F32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }

static inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }

static inline F32x16 min(F32x16 a, F32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }

static inline F32x16 max(F32x16 a, F32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }

static inline Mask greater(F32x16 a, F32x16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ); }

static inline Mask unordered(F32x16 a, F32x16 b) {
  return _mm512_cmp_ps_mask(a.v, b.v, _CMP_UNORD_Q);
}

static inline F32x16 select(Mask mask, F32x16 a, F32x16 b) {
  return {_mm512_mask_blend_ps(static_cast<__mmask16>(mask), b.v, a.v)};
}

static inline F32x16 load_partial(const float* source, int count) {
  return {_mm512_maskz_loadu_ps(static_cast<__mmask16>(first_lanes(count)), source)};
}

static inline void store_partial(float* target, F32x16 x, int count) {
  _mm512_mask_storeu_ps(target, static_cast<__mmask16>(first_lanes(count)), x.v);
}

// x * 2^n for integral n.
static inline F32x16 scale_by_power_of_2(F32x16 x, F32x16 n) {
  return {_mm512_scalef_ps(x.v, n.v)};
}

static inline float reduce_add(F32x16 x) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

static inline float reduce_max(F32x16 x) {
  const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

static inline __m256i load_16_halves(const uint16_t* source) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
}

static inline F32x16 load_bf16(const bf16_t* source) {
  const __m512i lanes = _mm512_cvtepu16_epi32(load_16_halves(source));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(lanes, 16))};
}

// Nearest bf16, ties to even, in the upper half of each lane; NaN stays NaN. Also where the
// instruction vcvtneps2bf16 exists: that one flushes subnormals.
static inline __m512i round_to_bf16_bits(F32x16 x) {
  const __m512i bits = _mm512_castps_si512(x.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  const __m512i rounded =
      _mm512_mask_or_epi32(_mm512_add_epi32(bits, bias), is_nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_and_si512(rounded, _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
}

static inline void store_bf16(bf16_t* target, F32x16 x) {
  const __m256i halves = _mm512_cvtepi32_epi16(_mm512_srli_epi32(round_to_bf16_bits(x), 16));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), halves);
}

static inline F32x16 load_f16(const uint16_t* source) {
  return {_mm512_cvtph_ps(load_16_halves(source))};
}

// The lower and the upper halves of 16 bf16 pairs, widened.
static inline F32x16 load_pair_low(const void* source) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(source), 16))};
}

static inline F32x16 load_pair_high(const void* source) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(source), upper))};
}

// Nearest bf16, ties to even, kept as float.
static inline F32x16 round_to_bf16(F32x16 x) {
  return {_mm512_castsi512_ps(round_to_bf16_bits(x))};
}

#if LMI_BF16_DOT

struct Bf16Pairs {
  __m512bh v;
};

static inline Bf16Pairs load_pairs(const void* source) {
  return {(__m512bh)_mm512_loadu_si512(source)};
}

// 16 pairs of signed bytes, exactly.
static inline Bf16Pairs load_byte_pairs(const int8_t* source) {
  const __m128i* bytes = reinterpret_cast<const __m128i*>(source);
  const __m512i low = _mm512_cvtepi8_epi32(_mm_loadu_si128(bytes));
  const __m512i high = _mm512_cvtepi8_epi32(_mm_loadu_si128(bytes + 1));
  return {_mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(high), _mm512_cvtepi32_ps(low))};
}

// The same two neighbours for every lane.
static inline Bf16Pairs broadcast_pair(const bf16_t* source) {
  int32_t pair;
  memcpy(&pair, source, sizeof(pair));
  return {(__m512bh)_mm512_set1_epi32(pair)};
}

// acc[i] += a[i].low * b[i].low + a[i].high * b[i].high, in the order of the level.
static inline F32x16 dp_bf16(F32x16 acc, Bf16Pairs a, Bf16Pairs b) {
  return {_mm512_dpbf16_ps(acc.v, a.v, b.v)};
}

#endif
