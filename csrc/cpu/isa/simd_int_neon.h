// Integers of the vector layer in NEON: bytes multiplied by usdot, sdot or widening
// multiplications, as the level has them. Included by simd_int.h only.

static inline I32x16 look_up(const uint8_t* table, I32x16 bytes) {
  const uint8x16_t entries = vld1q_u8(table);
  for (int i = 0; i < 4; ++i) {
    bytes.v[i] = (Ints4)vqtbl1q_u8(entries, vreinterpretq_u8_s32(bytes.v[i]));
  }
  return bytes;
}

static inline I32x16 widen_halves(uint16x8_t low, uint16x8_t high) {
  return {{(Ints4)vmovl_u16(vget_low_u16(low)), (Ints4)vmovl_high_u16(low),
           (Ints4)vmovl_u16(vget_low_u16(high)), (Ints4)vmovl_high_u16(high)}};
}
static inline I32x16 load_bytes(const uint8_t* source) {
  const uint8x16_t bytes = vld1q_u8(source);
  return widen_halves(vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes));
}
static inline I32x16 load_halves(const uint8_t* source) {
  return widen_halves(vreinterpretq_u16_u8(vld1q_u8(source)),
                      vreinterpretq_u16_u8(vld1q_u8(source + 16)));
}

// The table's four registers as bytes, of which a float's are neighbours.
static inline F32x16 look_up_float(const float* table, I32x16 indices) {
  const uint8x16x4_t entries = vld1q_u8_x4(reinterpret_cast<const uint8_t*>(table));
  const I32x16 bytes = (indices & 15u) * 0x04040404u + broadcast_int(0x03020100);
  F32x16 result;
  for (int i = 0; i < 4; ++i) {
    result.v[i] = vreinterpretq_f32_u8(vqtbl4q_u8(entries, vreinterpretq_u8_s32(bytes.v[i])));
  }
  return result;
}

static inline F32x16 from_halves(uint16x8_t low, uint16x8_t high) {
  uint16_t halves[kLanes];
  vst1q_u16(halves, low);
  vst1q_u16(halves + 8, high);
  return load_f16(halves);
}
// fp16 of bytes that are e4m3, but for the exponent's offset. NaN becomes 1.875: packing gives
// blocks that have one a scale of NaN.
static inline uint16x8_t e4m3_as_half(uint16x8_t upper) {
  const uint16x8_t sign = vandq_u16(upper, vdupq_n_u16(0x8000));
  return vorrq_u16(sign, vshrq_n_u16(vshlq_n_u16(upper, 1), 2));
}
static inline F32x16 load_e4m3(const uint8_t* source) {
  return from_halves(e4m3_as_half(vshll_n_u8(vld1_u8(source), 8)),
                     e4m3_as_half(vshll_n_u8(vld1_u8(source + 8), 8)));
}
static inline F32x16 load_e5m2(const uint8_t* source) {
  return from_halves(vshll_n_u8(vld1_u8(source), 8), vshll_n_u8(vld1_u8(source + 8), 8));
}

static inline void keep_in_register(I32x16& x) {
  __asm__("" : "+w"(x.v[0]), "+w"(x.v[1]), "+w"(x.v[2]), "+w"(x.v[3]));
}

static inline void store_bytes(uint8_t* target, F32x16 x) {
  int16x4_t words[4];
  for (int i = 0; i < 4; ++i) words[i] = vmovn_s32(vcvtq_s32_f32(x.v[i]));
  const int8x8_t low = vmovn_s16(vcombine_s16(words[0], words[1]));
  const int8x8_t high = vmovn_s16(vcombine_s16(words[2], words[3]));
  vst1q_u8(target, vreinterpretq_u8_s8(vcombine_s8(low, high)));
}

struct Quads {
  uint8x16_t v[4];
};
struct InputQuad {
  int8x16_t v;
};

static inline Quads load_codes(const void* source) {
  Quads result;
  memcpy(&result, source, sizeof(result));
  return result;
}
// Whole bytes as the level's products take them.
static inline Quads offset_quads(Quads codes) {
  if (kByteOffset == 0) return codes;
  for (int i = 0; i < 4; ++i) codes.v[i] = veorq_u8(codes.v[i], vdupq_n_u8(0x80));
  return codes;
}
static inline Quads make_quads(I32x16 bytes) { return offset_quads(load_codes(&bytes)); }
static inline Quads load_quads(const void* source) { return offset_quads(load_codes(source)); }
static inline Quads load_low_nibbles(const void* source) {
  Quads result = load_codes(source);
  for (int i = 0; i < 4; ++i) result.v[i] = vandq_u8(result.v[i], vdupq_n_u8(15));
  return result;
}
static inline Quads load_high_nibbles(const void* source) {
  Quads result = load_codes(source);
  for (int i = 0; i < 4; ++i) result.v[i] = vshrq_n_u8(result.v[i], 4);
  return result;
}
static inline InputQuad broadcast_quad(const void* source) {
  return {vreinterpretq_s8_s32(vdupq_n_s32(load_4_bytes(source)))};
}

static inline int32x4_t dot_lanes(int32x4_t acc, uint8x16_t a, int8x16_t b) {
#if LMI_BF16_DOT
  return vusdotq_s32(acc, a, b);
#elif LMI_BYTE_DOT
  return vdotq_s32(acc, vreinterpretq_s8_u8(a), b);
#else
  const int8x16_t codes = vreinterpretq_s8_u8(a);
  const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(codes), vget_low_s8(b)));
  const int32x4_t high = vpaddlq_s16(vmull_high_s8(codes, b));
  return vaddq_s32(acc, vpaddq_s32(low, high));
#endif
}
static inline I32x16 dot_quads(I32x16 acc, const Quads& a, InputQuad b) {
  for (int i = 0; i < 4; ++i) acc.v[i] = (Ints4)dot_lanes(acc.v[i], a.v[i], b.v);
  return acc;
}
