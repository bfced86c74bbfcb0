// Element types and the scalar conversions between them.
#pragma once

#include <bit>
#include <cstdint>

namespace lmi {

// From kQ4_0 to kMXFP4: GGUF's types of blocks (cpu/block_format.h). 4 bits of bitsandbytes' NF4
// and FP4, and 8 of e4m3 and e5m2, are codes of floats (cpu/float_codes.h).
enum class DType : uint8_t {
  kF32,
  kBF16,
  kF16,
  kI8,
  kI32,
  kI4,
  kE4M3,
  kQ4_0,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kQ8_0,
  kQ2_K,
  kQ3_K,
  kQ4_K,
  kQ5_K,
  kQ6_K,
  kIQ4_NL,
  kIQ4_XS,
  kMXFP4,
  kE5M2,
  kNF4,
  kFP4
};
constexpr int kNumDTypes = static_cast<int>(DType::kFP4) + 1;

// Bytes of an element; 0 for those of 4 bits, of which a byte holds two, and for types of blocks.
constexpr int64_t dtype_size(DType dtype) {
  switch (dtype) {
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kBF16:
    case DType::kF16:
      return 2;
    case DType::kI8:
    case DType::kE4M3:
    case DType::kE5M2:
      return 1;
    default:
      return 0;
  }
}

constexpr const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "fp32";
    case DType::kBF16:
      return "bf16";
    case DType::kF16:
      return "fp16";
    case DType::kI8:
      return "int8";
    case DType::kI32:
      return "int32";
    case DType::kI4:
      return "int4";
    case DType::kE4M3:
      return "e4m3";
    case DType::kQ4_0:
      return "q4_0";
    case DType::kQ4_1:
      return "q4_1";
    case DType::kQ5_0:
      return "q5_0";
    case DType::kQ5_1:
      return "q5_1";
    case DType::kQ8_0:
      return "q8_0";
    case DType::kQ2_K:
      return "q2_k";
    case DType::kQ3_K:
      return "q3_k";
    case DType::kQ4_K:
      return "q4_k";
    case DType::kQ5_K:
      return "q5_k";
    case DType::kQ6_K:
      return "q6_k";
    case DType::kIQ4_NL:
      return "iq4_nl";
    case DType::kIQ4_XS:
      return "iq4_xs";
    case DType::kMXFP4:
      return "mxfp4";
    case DType::kE5M2:
      return "e5m2";
    case DType::kNF4:
      return "nf4";
    case DType::kFP4:
      return "fp4";
  }
  return "?";
}

using bf16_t = uint16_t;  // the upper half of an IEEE float

inline float bf16_to_float(bf16_t value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value) << 16);
}

// Round to nearest, ties to even; NaN stays NaN.
inline bf16_t float_to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<bf16_t>((bits >> 16) | 0x40u);
  return static_cast<bf16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float f16_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) {
    return std::bit_cast<float>(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  }
  // Shifting the exponent by a multiplication gets subnormals right too.
  const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(scaled) | sign);
}

// 8-bit floats of four bits of exponent and three of mantissa, without infinities, by their bytes.
struct E4M3Table {
  float at[256];

  constexpr E4M3Table() : at() {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const uint32_t magnitude = byte & 0x7fu;
      const float normal = std::bit_cast<float>((magnitude << 20) + (120u << 23));
      const float value = magnitude < 8 ? 2.0f * (normal - 0x1p-7f) : normal;
      const uint32_t rest = (magnitude == 0x7fu ? 0x7fc00000u : 0u) | (byte & 0x80u) << 24;
      at[byte] = std::bit_cast<float>(std::bit_cast<uint32_t>(value) | rest);
    }
  }
};
inline constexpr E4M3Table kE4M3Values;

// Round to nearest, ties to even; too large: infinity, NaN stays NaN.
inline uint16_t float_to_f16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;
  if (magnitude < 0x38800000u) {
    // Adding 0.5 leaves a subnormal's steps of 2^-24 as the last bits of the sum.
    const float sum = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(sum) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

}  // namespace lmi
