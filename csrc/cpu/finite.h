// Whether weights are numbers as they are stored.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "common/dtype.h"
#include "cpu/packed_linear.h"

namespace lmi::cpu {

// Whether none of `count` floats has all bits of its exponent set, of which `step` is the lowest:
// adding it to such a magnitude, and to no smaller one, reaches the sign.
template <typename Word>
bool have_no_exponent_full(const void* data, int64_t count, std::type_identity_t<Word> step) {
  constexpr Word kSign = Word{1} << (std::numeric_limits<Word>::digits - 1);
  const auto* bytes = static_cast<const uint8_t*>(data);
  Word reached = 0;
  for (int64_t i = 0; i < count; ++i) {
    Word word;
    std::memcpy(&word, bytes + i * sizeof(Word), sizeof(Word));
    reached |= static_cast<Word>((word & ~kSign) + step);
  }
  return (reached & kSign) == 0;
}

// Whether `count` elements, at any address, are neither NaN nor infinite; types that have neither
// always are.
inline bool all_finite(DType dtype, const void* data, int64_t count) {
  switch (dtype) {
    case DType::kF32:
      return have_no_exponent_full<uint32_t>(data, count, 0x00800000);
    case DType::kBF16:
      return have_no_exponent_full<uint16_t>(data, count, 0x0080);
    case DType::kF16:
      return have_no_exponent_full<uint16_t>(data, count, 0x0400);
    case DType::kE4M3:  // has no infinities, and one NaN
      return have_no_exponent_full<uint8_t>(data, count, 0x01);
    case DType::kE5M2:
      return have_no_exponent_full<uint8_t>(data, count, 0x04);
    default:
      return true;
  }
}

// As pack_linear. False: a part holds a NaN or an infinity in these panels.
bool pack_looked_at(const std::vector<LinearPart>& parts, int64_t num_inputs, bool gated,
                    LinearFormat format, void* target, int64_t first_panel, int64_t end_panel);

}  // namespace lmi::cpu
