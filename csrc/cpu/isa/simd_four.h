// Vector layer of four 4-lane vectors of the compiler's own extension: what simd_scalar.h and
// simd_neon.h have in common. Included by simd.h only.

typedef float Lanes4 __attribute__((vector_size(16)));
typedef int32_t Ints4 __attribute__((vector_size(16)));

struct F32x16 {
  Lanes4 v[4];
};

static inline F32x16 broadcast(float value) {
  const Lanes4 lanes = {value, value, value, value};
  return {{lanes, lanes, lanes, lanes}};
}

static inline F32x16 load(const float* source) {
  F32x16 result;
  __builtin_memcpy(&result, source, sizeof(result));
  return result;
}

static inline void store(float* target, F32x16 x) { __builtin_memcpy(target, &x, sizeof(x)); }

static inline F32x16 operator+(F32x16 a, F32x16 b) {
  for (int i = 0; i < 4; ++i) a.v[i] += b.v[i];
  return a;
}

static inline F32x16 operator-(F32x16 a, F32x16 b) {
  for (int i = 0; i < 4; ++i) a.v[i] -= b.v[i];
  return a;
}

static inline F32x16 operator*(F32x16 a, F32x16 b) {
  for (int i = 0; i < 4; ++i) a.v[i] *= b.v[i];
  return a;
}

static inline F32x16 operator/(F32x16 a, F32x16 b) {
  for (int i = 0; i < 4; ++i) a.v[i] /= b.v[i];
  return a;
}

static inline F32x16 min(F32x16 a, F32x16 b) {
  for (int i = 0; i < 4; ++i) a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
  return a;
}

static inline F32x16 max(F32x16 a, F32x16 b) {
  for (int i = 0; i < 4; ++i) a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
  return a;
}

static inline F32x16 load_partial(const float* source, int count) {
  F32x16 result = broadcast(0.0f);
  __builtin_memcpy(&result, source, sizeof(float) * count);
  return result;
}

static inline void store_partial(float* target, F32x16 x, int count) {
  __builtin_memcpy(target, &x, sizeof(float) * count);
}

// x * 2^n for integral n in [-300, 300], in two steps so that every power is a normal number.
static inline F32x16 scale_by_power_of_2(F32x16 x, F32x16 n) {
  for (int i = 0; i < 4; ++i) {
    const Ints4 power = __builtin_convertvector(n.v[i], Ints4);
    const Ints4 half = power >> 1;
    const Ints4 first = (half + 127) << 23;
    const Ints4 second = (power - half + 127) << 23;
    x.v[i] = x.v[i] * (Lanes4)first;
    x.v[i] = x.v[i] * (Lanes4)second;
  }
  return x;
}

static inline float reduce_add(F32x16 x) {
  const Lanes4 four = (x.v[0] + x.v[2]) + (x.v[1] + x.v[3]);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

static inline float reduce_max(F32x16 x) {
  const Lanes4 left = x.v[0] > x.v[2] ? x.v[0] : x.v[2];
  const Lanes4 right = x.v[1] > x.v[3] ? x.v[1] : x.v[3];
  const Lanes4 four = left > right ? left : right;
  const float even = four[0] > four[2] ? four[0] : four[2];
  const float odd = four[1] > four[3] ? four[1] : four[3];
  return even > odd ? even : odd;
}

// The lower and the upper halves of 16 bf16 pairs, widened.
static inline F32x16 load_pair_low(const void* source) {
  F32x16 result;
  for (int i = 0; i < 4; ++i) {
    Ints4 bits;
    __builtin_memcpy(&bits, static_cast<const uint8_t*>(source) + 16 * i, sizeof(bits));
    bits <<= 16;
    __builtin_memcpy(&result.v[i], &bits, sizeof(bits));
  }
  return result;
}

static inline F32x16 load_pair_high(const void* source) {
  F32x16 result;
  for (int i = 0; i < 4; ++i) {
    Ints4 bits;
    __builtin_memcpy(&bits, static_cast<const uint8_t*>(source) + 16 * i, sizeof(bits));
    bits &= static_cast<int32_t>(0xffff0000u);
    __builtin_memcpy(&result.v[i], &bits, sizeof(bits));
  }
  return result;
}
