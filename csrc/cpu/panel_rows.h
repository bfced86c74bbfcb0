// The rows of a panel in the sources of a weight matrix, and reading them.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/kernels.h"

namespace lmi::cpu {

// A row of a source; data null: padding.
struct PanelRow {
  const uint8_t* data = nullptr;
  DType dtype = DType::kF32;
  const float* scales = nullptr;  // of codes
  int64_t num_scales = 0;
  const float* zeros = nullptr;
};

// The rows that make up one panel.
struct PanelRows {
  PanelRow at[kPanelOutputs];
};

inline PanelRows find_rows(const std::vector<LinearPart>& parts, int64_t num_inputs, bool gated,
                           int64_t panel) {
  PanelRows rows;
  const size_t first_part = gated ? panel % 2 : 0;
  const size_t end_part = gated ? first_part + 1 : parts.size();
  const int64_t first_row = (gated ? panel / 2 : panel) * kPanelOutputs;
  int64_t part_start = 0;
  for (size_t p = first_part; p < end_part; part_start += parts[p].num_outputs, ++p) {
    const LinearPart& part = parts[p];
    const int64_t begin = std::max(first_row, part_start);
    const int64_t end = std::min(first_row + kPanelOutputs, part_start + part.num_outputs);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t own = row - part_start;
      const int64_t offset = own * part.row_bytes(num_inputs);
      const int64_t scale = own * part.num_scales;
      rows.at[row - first_row] = {static_cast<const uint8_t*>(part.data) + offset, part.dtype,
                                  part.scales + scale, part.num_scales,
                                  part.zeros == nullptr ? nullptr : part.zeros + scale};
    }
  }
  return rows;
}

template <typename Target>
Target from_float(float value) {
  if constexpr (sizeof(Target) == sizeof(float)) {
    return value;
  } else {
    return float_to_bf16(value);
  }
}

template <typename Target, typename Source, typename Widen>
void convert_values(const uint8_t* row, int64_t first, int64_t count, Target* target, Widen widen) {
  for (int64_t i = 0; i < count; ++i) {
    Source value;
    std::memcpy(&value, row + (first + i) * sizeof(Source), sizeof(Source));
    target[i] = from_float<Target>(widen(value));
  }
}

// The same of e4m3 and e5m2, by stretches with one scale.
template <typename Target>
void convert_scaled(const PanelRow& row, int64_t first, int64_t count, Target* target) {
  for (int64_t done = 0; done < count;) {
    const int64_t column = first + done;
    const bool is_one = row.num_scales == 1;
    const float scale = row.scales[is_one ? 0 : column / kScaleInputs];
    const int64_t left = count - done;
    const int64_t length = is_one ? left : std::min(left, kScaleInputs - column % kScaleInputs);
    const auto widen = [&row, scale](uint8_t byte) {
      const float value = row.dtype == DType::kE4M3
                              ? kE4M3Values.at[byte]
                              : f16_to_float(static_cast<uint16_t>(byte << 8));
      return value * scale;
    };
    convert_values<Target, uint8_t>(row.data, column, length, target + done, widen);
    done += length;
  }
}

// Columns [first, first + count) of one row as Target; bf16 to bf16 keeps the bits.
template <typename Target>
void convert_row(const PanelRow& row, int64_t first, int64_t count, Target* target) {
  if (row.data == nullptr) {
    std::fill_n(target, count, Target{0});
  } else if (sizeof(Target) == dtype_size(row.dtype) && row.dtype != DType::kF16) {
    std::memcpy(target, row.data + first * sizeof(Target), count * sizeof(Target));
  } else if (row.dtype == DType::kF32) {
    convert_values<Target, float>(row.data, first, count, target,
                                  [](float value) { return value; });
  } else if (row.dtype == DType::kBF16) {
    convert_values<Target, bf16_t>(row.data, first, count, target, bf16_to_float);
  } else if (row.dtype == DType::kE4M3 || row.dtype == DType::kE5M2) {
    convert_scaled(row, first, count, target);
  } else {
    convert_values<Target, uint16_t>(row.data, first, count, target, f16_to_float);
  }
}

}  // namespace lmi::cpu
