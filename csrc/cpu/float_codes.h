// Weights whose codes stand for floats: weight = scale x value of the code, which fp32 holds.
//
// Packed, a block of 16 outputs has their fp32 scales, then their codes: of 4 bits, words of eight
// neighbouring inputs, whose lower halves of bytes are the first four; of 8 bits, a byte of every
// output for one input after the other.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace lmi::cpu {

struct FloatCodes {
  int32_t num_inputs = 0;  // of one scale; 0: the type isn't one of these
  int32_t num_bits = 0;    // of a code

  // Of an output's inputs with one scale.
  [[gnu::always_inline]] constexpr int64_t block_bytes() const {
    return 4 + int64_t{num_inputs} * num_bits / 8;
  }
  // Of an output's codes of so many inputs.
  constexpr int64_t code_bytes(int64_t inputs) const { return inputs * num_bits / 8; }
};

// What kernels call is inlined unoptimised, too: levels share no symbol.
[[gnu::always_inline]] constexpr FloatCodes float_codes(DType dtype) {
  switch (dtype) {
    case DType::kNF4:
    case DType::kFP4:
      return {64, 4};
    case DType::kE4M3:
    case DType::kE5M2:
      return {128, 8};
    default:
      return {};
  }
}

constexpr int64_t kMaxFloatCodeInputs = 1 << 18;  // so that a row fits into scratch memory

[[gnu::always_inline]] constexpr bool has_float_codes(DType dtype) {
  return float_codes(dtype).num_inputs != 0;
}
// Also as whole numbers, which quantised rows are multiplied with.
[[gnu::always_inline]] constexpr bool has_code_planes(DType dtype) {
  return float_codes(dtype).num_bits == 4;
}

// Format: QLoRA (arXiv 2305.14314), appendix E: quantiles of the normal distribution.
constexpr float kNF4Values[16] = {-1.0f,
                                  -0.6961928009986877f,
                                  -0.5250730514526367f,
                                  -0.39491748809814453f,
                                  -0.28444138169288635f,
                                  -0.18477343022823334f,
                                  -0.09105003625154495f,
                                  0.0f,
                                  0.07958029955625534f,
                                  0.16093020141124725f,
                                  0.24611230194568634f,
                                  0.33791524171829224f,
                                  0.44070982933044434f,
                                  0.5626170039176941f,
                                  0.7229568362236023f,
                                  1.0f};
// Format: bitsandbytes' FP4, twelfths of floats of 4 bits; the upper bit is the sign.
constexpr float kFP4Values[16] = {
    0.0f,  0.0625f / 12,  8.0f / 12,  1.0f,  4.0f / 12,  6.0f / 12,  2.0f / 12,  3.0f / 12,
    -0.0f, -0.0625f / 12, -8.0f / 12, -1.0f, -4.0f / 12, -6.0f / 12, -2.0f / 12, -3.0f / 12};

// What codes of 4 bits stand for as whole numbers of 16: value = (256 upper + lower - 32768) unit.
struct CodePlanes {
  uint8_t bytes[2][16] = {};  // upper, lower
  float unit = 0.0f;

  constexpr CodePlanes(const float (&values)[16], double steps)
      : unit(static_cast<float>(1 / steps)) {
    for (int i = 0; i < 16; ++i) {
      const int number = static_cast<int>(values[i] * steps + 32768.5);
      bytes[0][i] = static_cast<uint8_t>(number >> 8);
      bytes[1][i] = static_cast<uint8_t>(number & 255);
    }
  }
};
// Of all units that 16 bits allow, the one of which every value is nearest to a whole number: each
// is within 2^-17 (6.4e-6) of the largest.
constexpr CodePlanes kNF4Planes(kNF4Values, 25544.88);
// Every value is a multiple of 1 / 192, so these are exact.
constexpr CodePlanes kFP4Planes(kFP4Values, 170 * 192);

}  // namespace lmi::cpu
