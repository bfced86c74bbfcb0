// The instructions of csrc/cpu/isa/amx.h in plain C++, operation by operation as Intel's
// architecture manual, volume 2, defines them. What the processor would refuse ends the process.
#pragma once

#define LMI_AMX_STAND_IN 1

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace lmi::cpu::tiles {

struct Tile {
  int num_rows = 0;
  int row_bytes = 0;
  uint8_t data[16][64] = {};
};

struct Tiles {
  bool is_configured = false;
  Tile at[8];
};

static thread_local Tiles registers;

static inline void require(bool condition) {
  if (!condition) std::abort();
}

static inline void configure(const void* config) {
  const uint8_t* bytes = static_cast<const uint8_t*>(config);
  registers = Tiles();
  require(bytes[0] == 1 && bytes[1] == 0);
  for (int i = 2; i < 16; ++i) require(bytes[i] == 0);
  for (int i = 0; i < 16; ++i) {
    uint16_t row_bytes;
    std::memcpy(&row_bytes, bytes + 16 + 2 * i, sizeof(row_bytes));
    const int num_rows = bytes[48 + i];
    require(i < 8 ? row_bytes <= 64 && num_rows <= 16 : row_bytes == 0 && num_rows == 0);
    require((row_bytes == 0) == (num_rows == 0));
    if (i >= 8) continue;
    registers.at[i].num_rows = num_rows;
    registers.at[i].row_bytes = row_bytes;
  }
  registers.is_configured = true;
}

static inline void release() { registers = Tiles(); }

static inline Tile& tile(int index) {
  require(registers.is_configured && registers.at[index].num_rows > 0);
  return registers.at[index];
}

static inline void clear(Tile& tile) { std::memset(tile.data, 0, sizeof(tile.data)); }

template <int kTile>
static inline void set_zero() {
  clear(tile(kTile));
}

template <int kTile>
static inline void load(const void* source, int64_t stride) {
  Tile& target = tile(kTile);
  clear(target);
  for (int row = 0; row < target.num_rows; ++row) {
    std::memcpy(target.data[row], static_cast<const uint8_t*>(source) + row * stride,
                static_cast<size_t>(target.row_bytes));
  }
}

template <int kTile>
static inline void store(void* target, int64_t stride) {
  const Tile& source = tile(kTile);
  for (int row = 0; row < source.num_rows; ++row) {
    std::memcpy(static_cast<uint8_t*>(target) + row * stride, source.data[row],
                static_cast<size_t>(source.row_bytes));
  }
}

template <typename Value>
static inline Value value_of(const Tile& tile, int row, int index) {
  Value value;
  std::memcpy(&value, tile.data[row] + index * sizeof(Value), sizeof(Value));
  return value;
}

// Subnormal numbers are zeros, read and written.
static inline float flush(float value) {
  return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.0f, value) : value;
}

static inline float widen(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return flush(value);
}

static inline void require_shapes(const Tile& sums, const Tile& rows, const Tile& weights) {
  require(sums.row_bytes == weights.row_bytes && rows.row_bytes == 4 * weights.num_rows);
  require(sums.num_rows == rows.num_rows && sums.row_bytes % 4 == 0);
}

// sum(m, n, before): what the sum of 32 bits in row m, column n becomes.
template <typename Value, typename Sum>
static inline void replace_sums(Tile& sums, const Sum& sum) {
  for (int m = 0; m < sums.num_rows; ++m) {
    for (int n = 0; n < sums.row_bytes / 4; ++n) {
      const Value value = sum(m, n, value_of<Value>(sums, m, n));
      std::memcpy(sums.data[m] + 4 * n, &value, sizeof(value));
    }
  }
}

// TDPBF16PS
template <int kSums, int kRows, int kWeights>
static inline void dot_bf16() {
  static_assert(kSums != kRows && kSums != kWeights && kRows != kWeights);
  const Tile &rows = tile(kRows), &weights = tile(kWeights);
  require_shapes(tile(kSums), rows, weights);
  replace_sums<float>(tile(kSums), [&](int m, int n, float before) {
    float halves[2] = {0.0f, 0.0f};
    for (int k = 0; k < rows.row_bytes / 4; ++k) {
      for (int i = 0; i < 2; ++i) {
        const float a = widen(value_of<uint16_t>(rows, m, 2 * k + i));
        const float b = widen(value_of<uint16_t>(weights, k, 2 * n + i));
        halves[i] = flush(__builtin_fmaf(a, b, halves[i]));
      }
    }
    return flush(flush(before) + flush(halves[0] + halves[1]));
  });
}

// TDPBSUD
template <int kSums, int kRows, int kWeights>
static inline void dot_bytes() {
  static_assert(kSums != kRows && kSums != kWeights && kRows != kWeights);
  const Tile &rows = tile(kRows), &weights = tile(kWeights);
  require_shapes(tile(kSums), rows, weights);
  replace_sums<uint32_t>(tile(kSums), [&](int m, int n, uint32_t sum) {
    for (int k = 0; k < rows.row_bytes / 4; ++k) {
      for (int i = 0; i < 4; ++i) {
        sum += static_cast<uint32_t>(value_of<int8_t>(rows, m, 4 * k + i) *
                                     value_of<uint8_t>(weights, k, 4 * n + i));
      }
    }
    return sum;
  });
}

}  // namespace lmi::cpu::tiles
