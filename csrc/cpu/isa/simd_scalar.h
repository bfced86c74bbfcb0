// What of the vector layer a machine does that is known for nothing: the four vectors become SSE2
// or NEON, without fused multiply-add. Included by simd.h only.

static inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return a * b + c; }

static inline Mask greater(F32x16 a, F32x16 b) {
  Mask mask = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    mask |= static_cast<Mask>(a.v[lane / 4][lane % 4] > b.v[lane / 4][lane % 4]) << lane;
  }
  return mask;
}

static inline Mask unordered(F32x16 a, F32x16 b) {
  Mask mask = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    const float x = a.v[lane / 4][lane % 4];
    const float y = b.v[lane / 4][lane % 4];
    mask |= static_cast<Mask>(x != x || y != y) << lane;
  }
  return mask;
}

static inline F32x16 select(Mask mask, F32x16 a, F32x16 b) {
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(mask >> lane & 1)) a.v[lane / 4][lane % 4] = b.v[lane / 4][lane % 4];
  }
  return a;
}

static inline F32x16 load_bf16(const bf16_t* source) {
  F32x16 result;
  for (int lane = 0; lane < kLanes; ++lane)
    result.v[lane / 4][lane % 4] = bf16_to_float(source[lane]);
  return result;
}

static inline void store_bf16(bf16_t* target, F32x16 x) {
  for (int lane = 0; lane < kLanes; ++lane) target[lane] = float_to_bf16(x.v[lane / 4][lane % 4]);
}

static inline F32x16 load_f16(const uint16_t* source) {
  F32x16 result;
  for (int lane = 0; lane < kLanes; ++lane)
    result.v[lane / 4][lane % 4] = f16_to_float(source[lane]);
  return result;
}

// Nearest bf16, ties to even, kept as float.
static inline F32x16 round_to_bf16(F32x16 x) {
  for (int lane = 0; lane < kLanes; ++lane) {
    x.v[lane / 4][lane % 4] = bf16_to_float(float_to_bf16(x.v[lane / 4][lane % 4]));
  }
  return x;
}
