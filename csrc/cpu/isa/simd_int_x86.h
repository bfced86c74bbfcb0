// Bytes of floats, for AVX2 and AVX-512. Included by simd_int.h only.

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
