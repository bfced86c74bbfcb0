#include "cpu/pack_float_codes.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "common/check.h"

namespace lmi::cpu {

namespace {

constexpr int64_t kScaleBytes = kPanelOutputs * sizeof(float);
constexpr int kNumValues = 16;

const float* values_of(DType dtype) { return dtype == DType::kNF4 ? kNF4Values : kFP4Values; }

// Codes of 4 bits in the order of their values, and the middles between neighbours.
struct ValueOrder {
  uint8_t codes[kNumValues];
  float middles[kNumValues - 1];

  explicit ValueOrder(const float* values) {
    std::iota(codes, codes + kNumValues, uint8_t{0});
    // FP4's two zeros keep their order: the negative one is never found.
    std::stable_sort(codes, codes + kNumValues,
                     [values](uint8_t a, uint8_t b) { return values[a] < values[b]; });
    for (int i = 0; i + 1 < kNumValues; ++i) {
      middles[i] = (values[codes[i]] + values[codes[i + 1]]) / 2;
    }
  }

  uint8_t nearest(float value) const {
    int place = 0;
    for (const float middle : middles) place += value > middle;
    return codes[place];
  }
};

const ValueOrder& order_of(DType dtype) {
  static const ValueOrder kNF4(kNF4Values), kFP4(kFP4Values);
  return dtype == DType::kNF4 ? kNF4 : kFP4;
}

bool is_nan(DType dtype, uint8_t code) {
  return (code & 0x7f) > (dtype == DType::kE4M3 ? 0x7e : 0x7c);
}

// A row's block of codes, and its scale; NaN where a code of 8 bits is.
float keep_block(const PanelRow& row, DType dtype, int64_t block, uint8_t* codes) {
  const FloatCodes format = float_codes(dtype);
  const int64_t num_bytes = format.code_bytes(format.num_inputs);
  std::memcpy(codes, row.data + block * num_bytes, num_bytes);
  const auto is_damaged = [dtype](uint8_t code) { return is_nan(dtype, code); };
  if (format.num_bits == 8 && std::any_of(codes, codes + num_bytes, is_damaged)) {
    return std::numeric_limits<float>::quiet_NaN();
  }
  return row.scales[row.num_scales == 1 ? 0 : block];
}

float quantize_block(const PanelRow& row, DType dtype, int64_t block, uint8_t* codes) {
  constexpr int64_t kInputs = float_codes(DType::kNF4).num_inputs;
  float weights[kInputs];
  convert_row(row, block * kInputs, kInputs, weights);
  float most = 0.0f;
  for (const float weight : weights) {
    const float size = std::fabs(weight);
    // Keeps a NaN.
    most = size > most || size != size ? size : most;
  }
  const float inverse = most > 0.0f ? 1.0f / most : 0.0f;
  const ValueOrder& order = order_of(dtype);
  for (int64_t i = 0; i < kInputs; i += 2) {
    const uint8_t first = order.nearest(weights[i] * inverse);
    codes[i / 2] = static_cast<uint8_t>(first << 4 | order.nearest(weights[i + 1] * inverse));
  }
  return most;
}

// Words of eight codes of 4 bits from bitsandbytes' order, in which the first of two is in a byte's
// upper half, to the panel's, in which lower halves are the first four.
void order_codes(std::vector<uint8_t>& codes) {
  for (size_t at = 0; at < codes.size(); at += 4) {
    uint8_t ordered[4];
    for (int i = 0; i < 4; ++i) {
      const auto code = [&](int input) {
        const uint8_t pair = codes[at + input / 2];
        return input % 2 == 0 ? pair >> 4 : pair & 15;
      };
      ordered[i] = static_cast<uint8_t>(code(i) | code(i + 4) << 4);
    }
    std::copy_n(ordered, 4, codes.begin() + static_cast<std::ptrdiff_t>(at));
  }
}

// The codes of 16 outputs into the panel's order.
void place_codes(const uint8_t* codes, int64_t lane_bytes, int32_t num_bits, uint8_t* target) {
  const int64_t unit = num_bits == 4 ? 4 : 1;
  for (int64_t at = 0; at < lane_bytes; at += unit) {
    for (int64_t lane = 0; lane < kPanelOutputs; ++lane, target += unit) {
      std::memcpy(target, codes + lane * lane_bytes + at, unit);
    }
  }
}

}  // namespace

int64_t float_code_panel_bytes(DType dtype, int64_t num_inputs) {
  const FloatCodes format = float_codes(dtype);
  return num_inputs / format.num_inputs * format.block_bytes() * kPanelOutputs;
}

void pack_float_codes(const PanelRows& rows, DType dtype, int64_t num_inputs, uint8_t* panel) {
  const FloatCodes format = float_codes(dtype);
  const int64_t lane_bytes = format.code_bytes(format.num_inputs);
  std::vector<uint8_t> codes(kPanelOutputs * lane_bytes);
  for (int64_t block = 0; block < num_inputs / format.num_inputs; ++block) {
    std::fill(codes.begin(), codes.end(), uint8_t{0});
    for (int64_t lane = 0; lane < kPanelOutputs; ++lane) {
      const PanelRow& row = rows.at[lane];
      uint8_t* own = codes.data() + lane * lane_bytes;
      float scale = 0.0f;
      if (row.data != nullptr) {
        const bool is_kept = row.dtype == dtype;
        scale = (is_kept ? keep_block : quantize_block)(row, dtype, block, own);
      }
      std::memcpy(panel + lane * sizeof(scale), &scale, sizeof(scale));
    }
    if (format.num_bits == 4) order_codes(codes);
    place_codes(codes.data(), lane_bytes, format.num_bits, panel + kScaleBytes);
    panel += format.block_bytes() * kPanelOutputs;
  }
}

float unpack_float_code(DType dtype, const uint8_t* panel, int64_t lane, int64_t input) {
  const FloatCodes format = float_codes(dtype);
  const uint8_t* block = panel + input / format.num_inputs * format.block_bytes() * kPanelOutputs;
  float scale;
  std::memcpy(&scale, block + lane * sizeof(scale), sizeof(scale));
  const uint8_t* codes = block + kScaleBytes;
  const int64_t at = input % format.num_inputs;
  if (format.num_bits == 8) {
    const uint8_t code = codes[at * kPanelOutputs + lane];
    const auto half = static_cast<uint16_t>(code << 8);
    return scale * (dtype == DType::kE4M3 ? kE4M3Values.at[code] : f16_to_float(half));
  }
  const uint8_t pair = codes[(at / 8 * kPanelOutputs + lane) * 4 + at % 4];
  return scale * values_of(dtype)[at % 8 < 4 ? pair & 15 : pair >> 4];
}

}  // namespace lmi::cpu
