#include "cpu/pack_quantized.h"

#include <algorithm>
#include <cstring>

#include "common/check.h"

namespace lmi::cpu {

namespace {

constexpr int64_t kStepBytes = 64;
constexpr int64_t kHeaderBytes = 64;
constexpr int32_t kOffset8 = 128, kMost8 = 127;
constexpr int32_t kOffset4 = 8, kLeast4 = -8, kMost4 = 7;

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

int64_t padded(LinearFormat format, int64_t num_inputs) {
  return round_up(num_inputs, format.dtype == DType::kI4 ? format.group_size : 4);
}

int64_t group_bytes(LinearFormat format) {
  return kHeaderBytes + format.group_size / 8 * kStepBytes;
}

// A lane's scale and zero point of a group.
void put_header(uint8_t* header, int64_t lane, uint16_t scale, float zero) {
  const uint16_t half = float_to_f16(zero);
  std::memcpy(header + lane * sizeof(scale), &scale, sizeof(scale));
  std::memcpy(header + (kPanelOutputs + lane) * sizeof(half), &half, sizeof(half));
}

uint32_t load_word(const uint8_t* source) {
  uint32_t word;
  std::memcpy(&word, source, sizeof(word));
  return word;
}

}  // namespace

int64_t quantized_panel_bytes(LinearFormat format, int64_t num_inputs) {
  const int64_t inputs = padded(format, num_inputs);
  if (format.dtype == DType::kI8) return kHeaderBytes + inputs / 4 * kStepBytes;
  return inputs / format.group_size * group_bytes(format);
}

float unpack_quantized(LinearFormat format, const uint8_t* panel, int64_t lane, int64_t input) {
  if (format.dtype == DType::kI8) {
    const float scale = reinterpret_cast<const float*>(panel)[lane];
    const uint8_t code = panel[kHeaderBytes + input / 4 * kStepBytes + lane * 4 + input % 4];
    return scale * static_cast<float>(code - kOffset8);
  }
  const uint8_t* group = panel + input / format.group_size * group_bytes(format);
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(group);
  const int64_t step = input % format.group_size / 8;
  const uint8_t pair = group[kHeaderBytes + step * kStepBytes + lane * 4 + input % 4];
  const int code = input % 8 < 4 ? pair & 0x0f : pair >> 4;
  const float zero = f16_to_float(halves[kPanelOutputs + lane]);
  return f16_to_float(halves[lane]) * (static_cast<float>(code) - zero);
}

PanelQuantizer::PanelQuantizer(LinearFormat format, int64_t num_inputs)
    : format_(format),
      num_inputs_(num_inputs),
      padded_inputs_(padded(format, num_inputs)),
      quantizer_(kernels(default_instruction_set()).weight_quantizer) {
  if (format.dtype != DType::kI8 && format.dtype != DType::kI4) return;
  weights_.resize(round_up(padded_inputs_, 16));
  codes_.resize(kPanelOutputs * padded_inputs_ + 16);
}

void PanelQuantizer::pack(const PanelRows& rows, uint8_t* panel) {
  if (format_.dtype == DType::kI8) {
    pack_int8(rows, panel);
  } else {
    pack_int4(rows, panel);
  }
}

float PanelQuantizer::quantize_int8(const PanelRow& row, uint8_t* codes) {
  convert_row(row, 0, num_inputs_, weights_.data());
  const float scale = quantizer_.find_scale(weights_.data(), num_inputs_, -kMost8, kMost8);
  quantizer_.encode(weights_.data(), padded_inputs_, scale, -kMost8, kMost8, kOffset8, codes);
  return scale;
}

void PanelQuantizer::quantize_int4(const PanelRow& row, int64_t lane, uint8_t* panel) {
  const int64_t group_size = format_.group_size;
  uint8_t* codes = codes_.data() + lane * padded_inputs_;
  convert_row(row, 0, num_inputs_, weights_.data());
  for (int64_t first = 0; first < padded_inputs_; first += group_size) {
    const float* weights = weights_.data() + first;
    const uint16_t scale =
        float_to_f16(quantizer_.find_scale(weights, group_size, kLeast4, kMost4));
    quantizer_.encode(weights, group_size, f16_to_float(scale), kLeast4, kMost4, kOffset4,
                      codes + first);
    put_header(panel, lane, scale, kOffset4);
    panel += group_bytes(format_);
  }
}

void PanelQuantizer::keep_int4(const PanelRow& row, int64_t lane, uint8_t* panel) {
  const float last_zero = std::clamp(row.zeros[row.num_scales - 1], 0.0f, 15.0f);
  keep_codes(row, static_cast<uint8_t>(last_zero), codes_.data() + lane * padded_inputs_);
  for (int64_t group = 0; group < row.num_scales; ++group) {
    put_header(panel, lane, float_to_f16(row.scales[group]), row.zeros[group]);
    panel += group_bytes(format_);
  }
}

void PanelQuantizer::keep_codes(const PanelRow& row, uint8_t padding, uint8_t* codes) {
  std::memcpy(codes, row.data, num_inputs_);
  std::fill(codes + num_inputs_, codes + padded_inputs_, padding);
}

void PanelQuantizer::pack_int8(const PanelRows& rows, uint8_t* panel) {
  for (int64_t lane = 0; lane < kPanelOutputs; ++lane) {
    const PanelRow& row = rows.at[lane];
    uint8_t* codes = codes_.data() + lane * padded_inputs_;
    float scale;
    if (row.dtype == DType::kI8) {
      keep_codes(row, kOffset8, codes);
      scale = row.scales[0];
    } else {
      scale = quantize_int8(row, codes);
    }
    std::memcpy(panel + lane * sizeof(scale), &scale, sizeof(scale));
  }
  uint8_t* target = panel + kHeaderBytes;
  for (int64_t input = 0; input < padded_inputs_; input += 4) {
    for (int64_t lane = 0; lane < kPanelOutputs; ++lane, target += 4) {
      std::memcpy(target, codes_.data() + lane * padded_inputs_ + input, 4);
    }
  }
}

void PanelQuantizer::pack_int4(const PanelRows& rows, uint8_t* panel) {
  for (int64_t lane = 0; lane < kPanelOutputs; ++lane) {
    const PanelRow& row = rows.at[lane];
    if (row.dtype == DType::kI4) {
      keep_int4(row, lane, panel);
    } else {
      quantize_int4(row, lane, panel);
    }
  }
  uint8_t* target = panel;
  for (int64_t input = 0; input < padded_inputs_; input += 8) {
    if (input % format_.group_size == 0) target += kHeaderBytes;
    for (int64_t lane = 0; lane < kPanelOutputs; ++lane, target += 4) {
      const uint8_t* codes = codes_.data() + lane * padded_inputs_ + input;
      const uint32_t pairs = load_word(codes) | load_word(codes + 4) << 4;
      std::memcpy(target, &pairs, sizeof(pairs));
    }
  }
}

}  // namespace lmi::cpu
