// What of the vector layer NEON does with instructions of its own, and dot products of bf16 where
// the level has them. Included by simd.h only.

static inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  for (int i = 0; i < 4; ++i) c.v[i] = vfmaq_f32(c.v[i], a.v[i], b.v[i]);
  return c;
}

// Bit i is set where all bits of lane i are.
static inline Mask make_mask(const uint32x4_t (&lanes)[4]) {
  const uint8x16_t bits = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  const uint16x8_t low = vcombine_u16(vmovn_u32(lanes[0]), vmovn_u32(lanes[1]));
  const uint16x8_t high = vcombine_u16(vmovn_u32(lanes[2]), vmovn_u32(lanes[3]));
  const uint8x16_t set = vandq_u8(vcombine_u8(vmovn_u16(low), vmovn_u16(high)), bits);
  return vaddv_u8(vget_low_u8(set)) | static_cast<Mask>(vaddv_u8(vget_high_u8(set))) << 8;
}

static inline Mask greater(F32x16 a, F32x16 b) {
  uint32x4_t lanes[4];
  for (int i = 0; i < 4; ++i) lanes[i] = vcgtq_f32(a.v[i], b.v[i]);
  return make_mask(lanes);
}

static inline Mask unordered(F32x16 a, F32x16 b) {
  uint32x4_t lanes[4];
  for (int i = 0; i < 4; ++i) {
    lanes[i] = vmvnq_u32(vandq_u32(vceqq_f32(a.v[i], a.v[i]), vceqq_f32(b.v[i], b.v[i])));
  }
  return make_mask(lanes);
}

static inline F32x16 select(Mask mask, F32x16 a, F32x16 b) {
  const uint32x4_t bits = {1, 2, 4, 8};
  for (int i = 0; i < 4; ++i) {
    a.v[i] = vbslq_f32(vtstq_u32(vdupq_n_u32(mask >> 4 * i), bits), a.v[i], b.v[i]);
  }
  return a;
}

static inline F32x16 load_bf16(const bf16_t* source) {
  F32x16 result;
  for (int i = 0; i < 4; ++i) {
    result.v[i] = vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(source + 4 * i), 16));
  }
  return result;
}

// Nearest bf16, ties to even, in the upper half of each lane; NaN stays NaN.
static inline uint32x4_t round_to_bf16_bits(float32x4_t x) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  const uint32x4_t nan = vorrq_u32(bits, vdupq_n_u32(0x400000));
  return vandq_u32(vbslq_u32(vceqq_f32(x, x), rounded, nan), vdupq_n_u32(0xffff0000u));
}

static inline void store_bf16(bf16_t* target, F32x16 x) {
  for (int i = 0; i < 4; ++i) {
    vst1_u16(target + 4 * i, vshrn_n_u32(round_to_bf16_bits(x.v[i]), 16));
  }
}

static inline F32x16 load_f16(const uint16_t* source) {
  F32x16 result;
  for (int i = 0; i < 4; ++i) {
    result.v[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(source + 4 * i)));
  }
  return result;
}

// Nearest bf16, ties to even, kept as float.
static inline F32x16 round_to_bf16(F32x16 x) {
  for (int i = 0; i < 4; ++i) x.v[i] = vreinterpretq_f32_u32(round_to_bf16_bits(x.v[i]));
  return x;
}

#if LMI_BF16_DOT

struct Bf16Pairs {
  bfloat16x8_t v[4];
};

static inline Bf16Pairs load_pairs(const void* source) {
  Bf16Pairs result;
  memcpy(&result, source, sizeof(result));
  return result;
}

// 16 pairs of signed bytes, exactly: the upper halves of their floats.
static inline Bf16Pairs load_byte_pairs(const int8_t* source) {
  Bf16Pairs result;
  for (int i = 0; i < 4; ++i) {
    const int16x8_t wide = vmovl_s8(vld1_s8(source + 8 * i));
    const float32x4_t low = vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
    const float32x4_t high = vcvtq_f32_s32(vmovl_high_s16(wide));
    const uint16x8_t upper = vuzp2q_u16(vreinterpretq_u16_f32(low), vreinterpretq_u16_f32(high));
    result.v[i] = vreinterpretq_bf16_u16(upper);
  }
  return result;
}

// The same two neighbours for every lane.
static inline Bf16Pairs broadcast_pair(const bf16_t* source) {
  uint32_t pair;
  memcpy(&pair, source, sizeof(pair));
  __asm__("" : "+r"(pair));  // GCC 12 would write a constant of bf16 as one of fp16.
  const bfloat16x8_t lanes = vreinterpretq_bf16_u32(vdupq_n_u32(pair));
  return {{lanes, lanes, lanes, lanes}};
}

// acc[i] += a[i].low * b[i].low + a[i].high * b[i].high, in the order of the level: the two
// products are added to each other first, and every sum is rounded to odd.
static inline F32x16 dp_bf16(F32x16 acc, Bf16Pairs a, Bf16Pairs b) {
  for (int i = 0; i < 4; ++i) acc.v[i] = vbfdotq_f32(acc.v[i], a.v[i], b.v[i]);
  return acc;
}

#endif
