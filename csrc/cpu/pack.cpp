// Weight matrices between row-major order and the panels that the linear kernels read.
//
// A panel interleaves 16 rows word by word, a word being one fp32 or two neighbouring bf16: packing
// is a transposition of [16, words] to [words, 16], done in strips that fit the L1 cache. It runs
// once per weight and is bound by memory and page faults.
#include <algorithm>
#include <cstring>

#include "common/check.h"
#include "cpu/kernels.h"

namespace lmi::cpu {

namespace {

constexpr int64_t kStripColumns = 512;

// The rows that make up one panel; null: padding.
struct PanelRows {
  const uint8_t* data[kPanelOutputs] = {};
  DType dtype[kPanelOutputs] = {};
};

PanelRows find_rows(const std::vector<LinearPart>& parts, int64_t num_inputs, bool gated,
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
      const int64_t offset = (row - part_start) * num_inputs * dtype_size(part.dtype);
      rows.data[row - first_row] = static_cast<const uint8_t*>(part.data) + offset;
      rows.dtype[row - first_row] = part.dtype;
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
void convert(const uint8_t* row, int64_t first, int64_t count, Target* target, Widen widen) {
  for (int64_t i = 0; i < count; ++i) {
    Source value;
    std::memcpy(&value, row + (first + i) * sizeof(Source), sizeof(Source));
    target[i] = from_float<Target>(widen(value));
  }
}

// Columns [first, first + count) of one row as Target; bf16 to bf16 keeps the bits.
template <typename Target>
void convert_row(const uint8_t* row, DType dtype, int64_t first, int64_t count, Target* target) {
  if (row == nullptr) {
    std::fill_n(target, count, Target{0});
  } else if (sizeof(Target) == dtype_size(dtype) && dtype != DType::kF16) {
    std::memcpy(target, row + first * sizeof(Target), count * sizeof(Target));
  } else if (dtype == DType::kF32) {
    convert<Target, float>(row, first, count, target, [](float value) { return value; });
  } else if (dtype == DType::kBF16) {
    convert<Target, bf16_t>(row, first, count, target, bf16_to_float);
  } else {
    convert<Target, uint16_t>(row, first, count, target, f16_to_float);
  }
}

template <typename Target>
void pack_panel(const PanelRows& rows, int64_t num_inputs, uint32_t* target) {
  constexpr int64_t kPerWord = sizeof(uint32_t) / sizeof(Target);
  alignas(64) Target strip[kPanelOutputs][kStripColumns];
  for (int64_t first = 0; first < num_inputs; first += kStripColumns) {
    const int64_t count = std::min(kStripColumns, num_inputs - first);
    const int64_t num_words = (count + kPerWord - 1) / kPerWord;
    for (int64_t r = 0; r < kPanelOutputs; ++r) {
      convert_row(rows.data[r], rows.dtype[r], first, count, strip[r]);
      if (count < num_words * kPerWord) strip[r][count] = Target{0};
    }
    for (int64_t word = 0; word < num_words; ++word) {
      for (int64_t r = 0; r < kPanelOutputs; ++r) {
        std::memcpy(target++, &strip[r][word * kPerWord], sizeof(uint32_t));
      }
    }
  }
}

int64_t padded_inputs(DType dtype, int64_t num_inputs) {
  return dtype == DType::kBF16 ? (num_inputs + 1) / 2 * 2 : num_inputs;
}

int64_t panel_bytes(DType dtype, int64_t num_inputs) {
  return kPanelOutputs * padded_inputs(dtype, num_inputs) * dtype_size(dtype);
}

void check_parts(const std::vector<LinearPart>& parts, bool gated) {
  for (const LinearPart& part : parts) {
    const bool is_float =
        part.dtype == DType::kF32 || part.dtype == DType::kBF16 || part.dtype == DType::kF16;
    LMI_CHECK(is_float, "weights are fp32, bf16 or fp16, not ", dtype_name(part.dtype));
  }
  if (!gated) return;
  LMI_CHECK(parts.size() == 2, "a gated weight has the parts gate and up, got ", parts.size());
  LMI_CHECK(parts[0].num_outputs == parts[1].num_outputs, "gate has ", parts[0].num_outputs,
            " outputs, up has ", parts[1].num_outputs);
}

}  // namespace

int64_t num_linear_panels(int64_t num_outputs, bool gated) {
  const int64_t parts = gated ? 2 : 1;
  return parts * ((num_outputs / parts + kPanelOutputs - 1) / kPanelOutputs);
}

int64_t packed_linear_bytes(DType dtype, int64_t num_outputs, int64_t num_inputs, bool gated) {
  return num_linear_panels(num_outputs, gated) * panel_bytes(dtype, num_inputs);
}

void pack_linear(const std::vector<LinearPart>& parts, int64_t num_inputs, bool gated, DType dtype,
                 void* target, int64_t first_panel, int64_t end_panel) {
  LMI_CHECK(dtype == DType::kF32 || dtype == DType::kBF16, "linear format ", dtype_name(dtype));
  check_parts(parts, gated);
  for (int64_t panel = first_panel; panel < end_panel; ++panel) {
    const PanelRows rows = find_rows(parts, num_inputs, gated, panel);
    uint8_t* bytes = static_cast<uint8_t*>(target) + panel * panel_bytes(dtype, num_inputs);
    uint32_t* words = reinterpret_cast<uint32_t*>(bytes);
    if (dtype == DType::kBF16) {
      pack_panel<bf16_t>(rows, num_inputs, words);
    } else {
      pack_panel<float>(rows, num_inputs, words);
    }
  }
}

void unpack_linear(const PackedLinear& weight, float* target) {
  const int64_t stride = panel_bytes(weight.dtype, weight.num_inputs);
  const int64_t num_parts = weight.gated ? 2 : 1;
  const int64_t part_outputs = weight.num_outputs / num_parts;
  for (int64_t output = 0; output < weight.num_outputs; ++output) {
    const int64_t row = output % part_outputs;
    const int64_t panel = row / kPanelOutputs * num_parts + output / part_outputs;
    const int64_t lane = row % kPanelOutputs;
    const uint8_t* data = static_cast<const uint8_t*>(weight.data) + panel * stride;
    for (int64_t input = 0; input < weight.num_inputs; ++input) {
      float& value = target[output * weight.num_inputs + input];
      if (weight.dtype == DType::kF32) {
        value = reinterpret_cast<const float*>(data)[input * kPanelOutputs + lane];
      } else {
        const bf16_t* halves = reinterpret_cast<const bf16_t*>(data);
        value = bf16_to_float(halves[(input / 2 * kPanelOutputs + lane) * 2 + input % 2]);
      }
    }
  }
}

}  // namespace lmi::cpu
