// The device layer (csrc/cuda/device.cuh) on the emulator: operations as PTX defines them.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "common/dtype.h"
#include "cuda/fragment.h"
#include "cuda_emulator/emulator.h"

#define __global__
// Always inlined, as for a device: what a call returns is else stored unseen (races.h).
#define __device__ __attribute__((always_inline))
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
// One block runs at a time, so its shared variables can be the program's.
#define __shared__ static
#define __launch_bounds__(...)
// What is no access of a thread's own (races.h).
#define LMI_UNWATCHED __attribute__((no_sanitize("thread")))

namespace lmi::cuda {

inline emulator::Dim3& threadIdx = emulator::thread_index;
inline emulator::Dim3& blockIdx = emulator::block_index;
inline emulator::Dim3& blockDim = emulator::block_size;
inline emulator::Dim3& gridDim = emulator::grid_size;

// ---- numbers

inline float float_of_bits(uint32_t bits) { return std::bit_cast<float>(bits); }

inline float to_float(float value) { return value; }
inline float to_float(bf16 value) { return bf16_to_float(value.bits); }
inline float to_float(f16 value) { return f16_to_float(value.bits); }

// Of an 8-bit float with that many bits of mantissa.
template <int kMantissa>
float float8_value(uint8_t bits) {
  constexpr int kBias = (1 << (6 - kMantissa)) - 1;
  constexpr int kUnits = 1 << kMantissa;
  const int exponent = (bits & 0x7f) >> kMantissa;
  const int mantissa = bits % kUnits;
  const bool is_nan = kMantissa == 3 ? (bits & 0x7f) == 0x7f : (bits & 0x7f) > 0x7c;
  float size = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), 1 - kBias - kMantissa)
                             : std::ldexp(static_cast<float>(mantissa + kUnits),
                                          exponent - kBias - kMantissa);
  if (is_nan) size = std::nanf("");
  if (kMantissa == 2 && (bits & 0x7f) == 0x7c) size = INFINITY;
  return (bits & 0x80) != 0 ? -size : size;
}

// The nearest, the even one of two; the largest for what is beyond, NaN for what isn't finite.
template <int kMantissa>
uint8_t float8_bits(float value) {
  constexpr uint8_t kLargest = kMantissa == 3 ? 0x7e : 0x7b;
  constexpr uint8_t kNan = 0x7f;
  if (!std::isfinite(value)) return kNan;
  const float size = std::fabs(value);
  uint8_t low = 0;
  while (low < kLargest && float8_value<kMantissa>(low + 1) <= size) ++low;
  if (low < kLargest) {
    const float below = size - float8_value<kMantissa>(low);
    const float above = float8_value<kMantissa>(low + 1) - size;
    if (above < below || (above == below && low % 2 == 1)) ++low;
  }
  return static_cast<uint8_t>(low | (std::signbit(value) ? 0x80 : 0));
}

template <typename T>
__forceinline__ T from_float(float value) {
  if constexpr (std::is_same_v<T, i8>) {
    const float nearest = std::nearbyint(std::fmin(std::fmax(value, -127.0f), 127.0f));
    return {static_cast<uint8_t>(static_cast<int8_t>(nearest))};
  } else if constexpr (std::is_same_v<T, e4m3>) {
    return {float8_bits<3>(value)};
  } else if constexpr (std::is_same_v<T, e5m2>) {
    return {float8_bits<2>(value)};
  } else if constexpr (std::is_same_v<T, bf16>) {
    return {float_to_bf16(value)};
  } else if constexpr (std::is_same_v<T, f16>) {
    return {float_to_f16(value)};
  } else {
    return value;
  }
}

template <typename T>
uint32_t pack_pair(float low, float high) {
  return static_cast<uint32_t>(from_float<T>(low).bits) |
         static_cast<uint32_t>(from_float<T>(high).bits) << 16;
}

template <typename T>
uint32_t subtract_pairs(uint32_t a, uint32_t b) {
  const auto half = [](uint32_t word, int at) {
    return to_float(T{static_cast<uint16_t>(word >> (16 * at))});
  };
  return pack_pair<T>(half(a, 0) - half(b, 0), half(a, 1) - half(b, 1));
}

template <typename T, typename Code>
uint32_t widen_pair(uint32_t codes) {
  constexpr int kMantissa = std::is_same_v<Code, e4m3> ? 3 : 2;
  return pack_pair<T>(float8_value<kMantissa>(codes & 0xff),
                      float8_value<kMantissa>(codes >> 8 & 0xff));
}

inline uint32_t masked_or(uint32_t value, uint32_t mask, uint32_t bits) {
  return (value & mask) | bits;
}

inline uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = a | uint64_t{b} << 32;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t chosen = selector >> (4 * i) & 7;
    result |= static_cast<uint32_t>(bytes >> (8 * chosen) & 0xff) << (8 * i);
  }
  return result;
}

inline const uint8_t* summed(const uint8_t* pointer) { return pointer; }
inline int unknown(int value) { return value; }

inline float max_of(float a, float b) { return std::fmax(a, b); }
inline float product_of(float a, float b) { return a * b; }
inline float inverse_sqrt(float value) { return 1.0f / std::sqrt(value); }
inline float exp_of(float value) { return std::exp(value); }
inline float erf_of(float value) { return std::erf(value); }
inline float exp2_of(float value) { return std::exp2(value); }
inline float log2_of(float value) { return std::log2(value); }
inline float quotient_of(float a, float b) { return a / b; }

// ---- threads

inline void block_barrier() { emulator::block_barrier(); }
inline void warp_barrier() { emulator::warp_barrier(); }
inline uint8_t* shared_memory() { return emulator::shared_memory(); }

template <typename T>
__forceinline__ T shuffle(T value, int lane) {
  constexpr int kWords = sizeof(T) / sizeof(uint32_t);
  uint32_t words[kWords];
  std::memcpy(words, &value, sizeof(T));
  const uint32_t* given = emulator::exchange(words, kWords);
  std::memcpy(&value, given + lane * kWords, sizeof(T));
  return value;
}

template <typename T>
__forceinline__ T shuffle_xor(T value, int distance) {
  return shuffle(value, (static_cast<int>(threadIdx.x) % kWarpSize) ^ distance);
}

template <int kWidth, typename T>
__forceinline__ T shuffle_among(T value, int lane) {
  const int own = static_cast<int>(threadIdx.x) % kWarpSize;
  return shuffle(value, own / kWidth * kWidth + lane);
}

inline bool any_of_warp(bool is_so) {
  const uint32_t word = is_so ? 1 : 0;
  const uint32_t* given = emulator::exchange(&word, 1);
  return std::any_of(given, given + kWarpSize, [](uint32_t other) { return other != 0; });
}

template <typename T>
LMI_UNWATCHED T atomic_add(T* target, T value) {
  emulator::note_atomic(target, sizeof(T));
  const T before = *target;
  *target = before + value;
  return before;
}

inline void publish_writes() { emulator::publish_writes(); }
inline int32_t arrive(int32_t* counter) {
  emulator::arrive(counter);
  return atomic_add(counter, 1);
}
inline void see_writes(const int32_t* counter) { emulator::see_arrivals(counter); }

template <typename T>
__forceinline__ T load_fresh(const T* source) {
  return *source;
}

// ---- copies from global to shared memory

template <int kBytes = 16>
__forceinline__ void copy_async(void* target, const void* source, bool is_valid) {
  LMI_CHECK(reinterpret_cast<uintptr_t>(target) % kBytes == 0, "an unaligned copy");
  LMI_CHECK(!is_valid || reinterpret_cast<uintptr_t>(source) % kBytes == 0, "an unaligned copy");
  emulator::copy_later(target, source, is_valid ? kBytes : 0, kBytes);
}
inline void wait_for_earlier_kernels() { emulator::wait_for_earlier_kernels(); }
inline void prefetch(const void*) {}

inline void end_copy_group() { emulator::end_copy_group(); }
template <int kNumPending>
__forceinline__ void wait_for_copies() {
  emulator::wait_for_copies(kNumPending);
}

// ---- matrices

constexpr int kRowWords = 4;

// What is in every lane's row, which that lane reads, whoever gets it.
__forceinline__ const uint32_t* exchange_rows(const void* row) {
  LMI_CHECK(reinterpret_cast<uintptr_t>(row) % 16 == 0, "an unaligned matrix row");
  const auto own = *static_cast<const Vector<uint32_t, kRowWords>*>(row);
  return emulator::exchange(own.at, kRowWords);
}

__forceinline__ void load_matrices(uint32_t (&words)[4], const void* row) {
  const uint32_t* given = exchange_rows(row);
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  for (int matrix = 0; matrix < 4; ++matrix) {
    words[matrix] = given[(matrix * 8 + lane / 4) * kRowWords + lane % 4];
  }
}

__forceinline__ void load_transposed(uint32_t (&words)[4], const void* row) {
  const uint32_t* given = exchange_rows(row);
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  for (int matrix = 0; matrix < 4; ++matrix) {
    const auto half_of = [&](int at) {
      return given[(matrix * 8 + at) * kRowWords + lane / 8] >> (lane / 4 % 2 * 16) & 0xffff;
    };
    words[matrix] = half_of(lane % 4 * 2) | half_of(lane % 4 * 2 + 1) << 16;
  }
}

// Which part of which of the words that the lanes gave an operand's element is in.
struct Place {
  int word;
  int part;
};

constexpr int kOperandWords = 6;  // of a lane: four of the left, two of the right operand

// kDepth: elements of a row of the left operand; kParts: elements of a word.
template <int kDepth, int kParts>
struct Places {
  Place left[16][kDepth];
  Place right[kDepth][8];

  template <typename FragmentA, typename FragmentB>
  LMI_UNWATCHED Places(const FragmentA& fragment_of_a, const FragmentB& fragment_of_b) {
    for (int lane = 0; lane < kWarpSize; ++lane) {
      for (int part = 0; part < kParts; ++part) {
        for (int index = 0; index < 4; ++index) {
          const Element at = fragment_of_a(lane, index, part);
          left[at.row][at.column] = {lane * kOperandWords + index, part};
        }
        for (int index = 0; index < 2; ++index) {
          const Element at = fragment_of_b(lane, index, part);
          right[at.row][at.column] = {lane * kOperandWords + 4 + index, part};
        }
      }
    }
  }
};

// c += a b, where number(word, part) is what the bits stand for.
template <int kDepth, int kParts, typename Sum, typename Number>
LMI_UNWATCHED void add_products(const Places<kDepth, kParts>& places, Sum (&c)[4],
                                const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                const Number& number) {
  const uint32_t own[kOperandWords] = {a[0], a[1], a[2], a[3], b0, b1};
  const uint32_t* given = emulator::exchange(own, kOperandWords);
  for (int index = 0; index < 4; ++index) {
    const Element at = fragment_c(static_cast<int>(threadIdx.x) % kWarpSize, index);
    for (int k = 0; k < kDepth; ++k) {
      const Place left = places.left[at.row][k];
      const Place right = places.right[k][at.column];
      c[index] += number(given[left.word], left.part) * number(given[right.word], right.part);
    }
  }
}

template <typename T>
void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  static const Places<16, 2> places(fragment_a, fragment_b);
  add_products(places, c, a, b0, b1, [](uint32_t word, int half) LMI_UNWATCHED {
    return to_float(T{static_cast<uint16_t>(word >> (16 * half))});
  });
}

inline void multiply_add_bytes(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  static const Places<32, 4> places(byte_fragment_a, byte_fragment_b);
  add_products(places, c, a, b0, b1, [](uint32_t word, int byte) LMI_UNWATCHED {
    return static_cast<int32_t>(static_cast<int8_t>(word >> (8 * byte)));
  });
}

inline void multiply_add_e4m3(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  static const Places<32, 4> places(byte_fragment_a, byte_fragment_b);
  add_products(places, c, a, b0, b1, [](uint32_t word, int byte) LMI_UNWATCHED {
    return float8_value<3>(static_cast<uint8_t>(word >> (8 * byte)));
  });
}

}  // namespace lmi::cuda
