// Integers of the vector layer for any machine. Included by simd_int.h only.

static inline I32x16 look_up(const uint8_t* table, I32x16 bytes) {
  uint8_t entries[64];
  __builtin_memcpy(entries, &bytes, sizeof(entries));
  for (uint8_t& entry : entries) entry = table[entry];
  return load_int(entries);
}
static inline I32x16 load_bytes(const uint8_t* source) {
  int32_t lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = source[i];
  return load_int(lanes);
}
static inline I32x16 load_halves(const uint8_t* source) {
  uint16_t halves[kLanes];
  __builtin_memcpy(halves, source, sizeof(halves));
  int32_t lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = halves[i];
  return load_int(lanes);
}
static inline F32x16 look_up_float(const float* table, I32x16 indices) {
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = table[indices.v[i / 4][i % 4] & 15];
  return load(lanes);
}
// The linker mustn't share it.
static constexpr E4M3Table kE4M3Table;
static inline F32x16 load_e4m3(const uint8_t* source) {
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = kE4M3Table.at[source[i]] * 0x1p-8f;
  return load(lanes);
}
static inline F32x16 load_e5m2(const uint8_t* source) {
  uint16_t halves[kLanes];
  for (int i = 0; i < kLanes; ++i) halves[i] = static_cast<uint16_t>(source[i] << 8);
  return load_f16(halves);
}

static inline void keep_in_register(I32x16&) {}

static inline void store_bytes(uint8_t* target, F32x16 x) {
  for (int lane = 0; lane < kLanes; ++lane) {
    target[lane] = static_cast<uint8_t>(static_cast<int32_t>(x.v[lane / 4][lane % 4]));
  }
}

struct Quads {
  I32x16 bytes;
};
struct InputQuad {
  int32_t bytes[4];
};

static inline Quads make_quads(I32x16 bytes) { return {bytes}; }
static inline Quads load_quads(const void* source) { return {load_int(source)}; }
static inline Quads load_low_nibbles(const void* source) {
  Quads result = load_quads(source);
  for (int i = 0; i < 4; ++i) result.bytes.v[i] &= 0x0f0f0f0f;
  return result;
}
static inline Quads load_high_nibbles(const void* source) {
  Quads result = load_quads(source);
  for (int i = 0; i < 4; ++i) result.bytes.v[i] = result.bytes.v[i] >> 4 & 0x0f0f0f0f;
  return result;
}
static inline InputQuad broadcast_quad(const void* source) {
  int8_t bytes[4];
  memcpy(bytes, source, sizeof(bytes));
  return {{bytes[0], bytes[1], bytes[2], bytes[3]}};
}
static inline I32x16 dot_quads(I32x16 acc, const Quads& a, InputQuad b) {
  for (int j = 0; j < 4; ++j) {
    for (int i = 0; i < 4; ++i) acc.v[i] += (a.bytes.v[i] >> 8 * j & 0xff) * b.bytes[j];
  }
  return acc;
}
