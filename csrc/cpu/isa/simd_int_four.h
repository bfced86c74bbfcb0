// Integers of the vector layer in four vectors of the compiler's own extension: what
// simd_int_scalar.h and simd_int_neon.h have in common. Included by simd_int.h only.

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
static inline F32x16 as_float(I32x16 a) {
  F32x16 result;
  __builtin_memcpy(&result, &a, sizeof(result));
  return result;
}
