// Vector layer for AVX2 with FMA and F16C: two 8-lane registers. Included by simd.h only.

struct F32x16 {
  __m256 low, high;
};

static inline F32x16 broadcast(float value) {
  const __m256 lanes = _mm256_set1_ps(value);
  return {lanes, lanes};
}

static inline F32x16 load(const float* source) {
  return {_mm256_loadu_ps(source), _mm256_loadu_ps(source + 8)};
}

static inline void store(float* target, F32x16 x) {
  _mm256_storeu_ps(target, x.low);
  _mm256_storeu_ps(target + 8, x.high);
}

static inline F32x16 operator+(F32x16 a, F32x16 b) {
  return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}

static inline F32x16 operator-(F32x16 a, F32x16 b) {
  return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}

static inline F32x16 operator*(F32x16 a, F32x16 b) {
  return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}

static inline F32x16 operator/(F32x16 a, F32x16 b) {
  return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}

static inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}

static inline F32x16 min(F32x16 a, F32x16 b) {
  return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
}

static inline F32x16 max(F32x16 a, F32x16 b) {
  return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}

static inline Mask greater(F32x16 a, F32x16 b) {
  const int low = _mm256_movemask_ps(_mm256_cmp_ps(a.low, b.low, _CMP_GT_OQ));
  const int high = _mm256_movemask_ps(_mm256_cmp_ps(a.high, b.high, _CMP_GT_OQ));
  return static_cast<Mask>(low | high << 8);
}

static inline Mask unordered(F32x16 a, F32x16 b) {
  const int low = _mm256_movemask_ps(_mm256_cmp_ps(a.low, b.low, _CMP_UNORD_Q));
  const int high = _mm256_movemask_ps(_mm256_cmp_ps(a.high, b.high, _CMP_UNORD_Q));
  return static_cast<Mask>(low | high << 8);
}

// Lane masks of the lower 8 bits.
static inline __m256i expand_mask(Mask mask) {
  const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i set = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(mask)), bits);
  return _mm256_cmpeq_epi32(set, bits);
}

static inline F32x16 select(Mask mask, F32x16 a, F32x16 b) {
  const __m256 low = _mm256_castsi256_ps(expand_mask(mask));
  const __m256 high = _mm256_castsi256_ps(expand_mask(mask >> 8));
  return {_mm256_blendv_ps(b.low, a.low, low), _mm256_blendv_ps(b.high, a.high, high)};
}

static inline F32x16 load_partial(const float* source, int count) {
  const Mask mask = first_lanes(count);
  return {_mm256_maskload_ps(source, expand_mask(mask)),
          _mm256_maskload_ps(source + 8, expand_mask(mask >> 8))};
}

static inline void store_partial(float* target, F32x16 x, int count) {
  const Mask mask = first_lanes(count);
  _mm256_maskstore_ps(target, expand_mask(mask), x.low);
  _mm256_maskstore_ps(target + 8, expand_mask(mask >> 8), x.high);
}

static inline __m256 scale_by_power_of_2(__m256 x, __m256 n) {
  const __m256i bias = _mm256_set1_epi32(127);
  const __m256i power = _mm256_cvtps_epi32(n);
  const __m256i half = _mm256_srai_epi32(power, 1);
  const __m256i first = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
  const __m256i rest = _mm256_sub_epi32(power, half);
  const __m256i second = _mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23);
  x = _mm256_mul_ps(x, _mm256_castsi256_ps(first));
  return _mm256_mul_ps(x, _mm256_castsi256_ps(second));
}

// x * 2^n for integral n in [-300, 300], in two steps so that every power is a normal number.
static inline F32x16 scale_by_power_of_2(F32x16 x, F32x16 n) {
  return {scale_by_power_of_2(x.low, n.low), scale_by_power_of_2(x.high, n.high)};
}

static inline float reduce_add(F32x16 x) {
  const __m256 eight = _mm256_add_ps(x.low, x.high);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

static inline float reduce_max(F32x16 x) {
  const __m256 eight = _mm256_max_ps(x.low, x.high);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

static inline __m256 widen_bf16(__m128i halves) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

static inline __m128i load_8_halves(const uint16_t* source) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
}

static inline F32x16 load_bf16(const bf16_t* source) {
  return {widen_bf16(load_8_halves(source)), widen_bf16(load_8_halves(source + 8))};
}

// Nearest bf16, ties to even, in the upper half of each lane; NaN stays NaN.
static inline __m256i round_to_bf16_bits(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
  const __m256i rounded = _mm256_add_epi32(bits, bias);
  const __m256i nan = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i result = _mm256_blendv_epi8(rounded, nan, is_nan);
  return _mm256_and_si256(result, _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
}

static inline void store_bf16(bf16_t* target, F32x16 x) {
  const __m256i low = _mm256_srli_epi32(round_to_bf16_bits(x.low), 16);
  const __m256i high = _mm256_srli_epi32(round_to_bf16_bits(x.high), 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), packed);
}

static inline F32x16 load_f16(const uint16_t* source) {
  return {_mm256_cvtph_ps(load_8_halves(source)), _mm256_cvtph_ps(load_8_halves(source + 8))};
}

static inline __m256i load_8_pairs(const void* source, int first) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(source) + first);
}

// The lower and the upper halves of 16 bf16 pairs, widened.
static inline F32x16 load_pair_low(const void* source) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(load_8_pairs(source, 0), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(load_8_pairs(source, 1), 16))};
}

static inline F32x16 load_pair_high(const void* source) {
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm256_castsi256_ps(_mm256_and_si256(load_8_pairs(source, 0), upper)),
          _mm256_castsi256_ps(_mm256_and_si256(load_8_pairs(source, 1), upper))};
}

// By two shifts, slower: a mask would take a register that sums need.
static inline __m256 shifted_high(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_srli_epi32(pairs, 16), 16));
}
static inline F32x16 load_pair_high_unmasked(const void* source) {
  return {shifted_high(load_8_pairs(source, 0)), shifted_high(load_8_pairs(source, 1))};
}

// Nearest bf16, ties to even, kept as float.
static inline F32x16 round_to_bf16(F32x16 x) {
  return {_mm256_castsi256_ps(round_to_bf16_bits(x.low)),
          _mm256_castsi256_ps(round_to_bf16_bits(x.high))};
}
