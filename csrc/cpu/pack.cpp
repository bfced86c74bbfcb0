// Weight matrices between row-major order and the panels that the linear kernels read.
//
// A panel interleaves 16 rows word by word, a word being one fp32 or two neighbouring bf16: packing
// is a transposition of [16, words] to [words, 16], done in strips that fit the L1 cache. It runs
// once per weight and is bound by memory and page faults.
#include <algorithm>
#include <cstring>
#include <iterator>

#include "common/check.h"
#include "cpu/finite.h"
#include "cpu/kernels.h"
#include "cpu/pack_float_codes.h"
#include "cpu/pack_quantized.h"
#include "cpu/panel_rows.h"

namespace lmi::cpu {

namespace {

constexpr int64_t kStripColumns = 512;
constexpr int32_t kInt8Zero = 128;

template <typename Target>
void pack_panel(const PanelRows& rows, int64_t num_inputs, uint32_t* target) {
  constexpr int64_t kPerWord = sizeof(uint32_t) / sizeof(Target);
  alignas(64) Target strip[kPanelOutputs][kStripColumns];
  for (int64_t first = 0; first < num_inputs; first += kStripColumns) {
    const int64_t count = std::min(kStripColumns, num_inputs - first);
    const int64_t num_words = (count + kPerWord - 1) / kPerWord;
    for (int64_t r = 0; r < kPanelOutputs; ++r) {
      convert_row(rows.at[r], first, count, strip[r]);
      if (count < num_words * kPerWord) strip[r][count] = Target{0};
    }
    for (int64_t word = 0; word < num_words; ++word) {
      for (int64_t r = 0; r < kPanelOutputs; ++r) {
        std::memcpy(target++, &strip[r][word * kPerWord], sizeof(uint32_t));
      }
    }
  }
}

int64_t panel_bytes(LinearFormat format, int64_t num_inputs) {
  switch (format.dtype) {
    case DType::kF32:
      return kPanelOutputs * num_inputs * 4;
    case DType::kBF16:
      return kPanelOutputs * ((num_inputs + 1) / 2) * 4;
    case DType::kF16:
      return kPanelOutputs * num_inputs * 2;
    case DType::kI8:
    case DType::kI4:
      return quantized_panel_bytes(format, num_inputs);
    case DType::kE4M3:
    case DType::kE5M2:
    case DType::kNF4:
    case DType::kFP4:
      return float_code_panel_bytes(format.dtype, num_inputs);
    default: {
      const BlockFormat blocks = block_format(format.dtype);
      return kPanelOutputs * (num_inputs / blocks.num_inputs) * blocks.num_bytes;
    }
  }
}

void pack_halves(const PanelRows& rows, int64_t num_inputs, uint8_t* target) {
  for (int64_t lane = 0; lane < kPanelOutputs; ++lane) {
    const uint8_t* row = rows.at[lane].data;
    for (int64_t i = 0; i < num_inputs; ++i) {
      uint8_t* half = target + (i * kPanelOutputs + lane) * 2;
      row == nullptr ? std::memset(half, 0, 2) : std::memcpy(half, row + 2 * i, 2);
    }
  }
}

void pack_blocks(const PanelRows& rows, DType dtype, int64_t num_inputs, uint8_t* target) {
  const uint8_t* data[kPanelOutputs];
  for (int64_t lane = 0; lane < kPanelOutputs; ++lane) data[lane] = rows.at[lane].data;
  kernels(default_instruction_set()).block_packing.pack(dtype, data, num_inputs, target);
}

void check_codes(const LinearPart& part, int64_t num_inputs, LinearFormat format) {
  LMI_CHECK(part.dtype == format.dtype, dtype_name(part.dtype), " codes can't become ",
            dtype_name(format.dtype));
  const int64_t group = format.dtype == DType::kI4 ? format.group_size : num_inputs;
  const int64_t num_groups = (num_inputs + group - 1) / group;
  LMI_CHECK(part.num_scales == num_groups, num_groups, " scales an output, not ", part.num_scales);
  if (format.dtype == DType::kI4) return;
  LMI_CHECK(std::all_of(part.zeros, part.zeros + part.num_outputs,
                        [](float zero) { return zero == kInt8Zero; }),
            "the zero point of int8 codes is ", kInt8Zero);
}

void check_parts(const std::vector<LinearPart>& parts, int64_t num_inputs, bool gated,
                 LinearFormat format) {
  for (const LinearPart& part : parts) {
    const bool is_float =
        part.dtype == DType::kF32 || part.dtype == DType::kBF16 || part.dtype == DType::kF16;
    const bool is_scaled = has_float_codes(part.dtype) && part.scales != nullptr;
    const bool is_made = format.dtype == DType::kE4M3 || format.dtype == DType::kE5M2;
    const bool is_kept = is_of_blocks(part.dtype) || format.dtype == DType::kF16 || is_made ||
                         part.dtype == DType::kNF4 || part.dtype == DType::kFP4;
    LMI_CHECK(is_float || is_scaled || part.is_coded() || is_kept,
              "weights are fp32, bf16, fp16, codes with scales or blocks, not ",
              dtype_name(part.dtype));
    LMI_CHECK(part.dtype == format.dtype || !(is_kept || is_of_blocks(format.dtype)),
              dtype_name(part.dtype), " can't become ", dtype_name(format.dtype));
    if (part.is_coded()) check_codes(part, num_inputs, format);
  }
  if (!gated) return;
  LMI_CHECK(parts.size() == 2, "a gated weight has the parts gate and up, got ", parts.size());
  LMI_CHECK(parts[0].num_outputs == parts[1].num_outputs, "gate has ", parts[0].num_outputs,
            " outputs, up has ", parts[1].num_outputs);
}

// Read just before they are packed, so that the memory is read once.
bool are_finite(const PanelRows& rows, int64_t num_inputs) {
  return std::all_of(std::begin(rows.at), std::end(rows.at), [num_inputs](const PanelRow& row) {
    return row.data == nullptr || all_finite(row.dtype, row.data, num_inputs);
  });
}

}  // namespace

int64_t num_linear_panels(int64_t num_outputs, bool gated) {
  const int64_t parts = gated ? 2 : 1;
  return parts * ((num_outputs / parts + kPanelOutputs - 1) / kPanelOutputs);
}

int64_t packed_linear_bytes(LinearFormat format, int64_t num_outputs, int64_t num_inputs,
                            bool gated) {
  return num_linear_panels(num_outputs, gated) * panel_bytes(format, num_inputs);
}

const char* row_rounding_name(RowRounding rounding) {
  switch (rounding) {
    case RowRounding::kInt8:
      return "int8";
    case RowRounding::kOutliers:
      return "outliers";
    case RowRounding::kLlmInt8:
      return "llm_int8";
    default:
      return "none";
  }
}

RowRounding parse_row_rounding(const std::string& name) {
  for (const RowRounding rounding :
       {RowRounding::kInt8, RowRounding::kOutliers, RowRounding::kNone, RowRounding::kLlmInt8}) {
    if (name == row_rounding_name(rounding)) return rounding;
  }
  throw Error("rounding '" + name + "'; known are int8, outliers, none, llm_int8");
}

void check_linear_format(LinearFormat format, int64_t num_inputs) {
  const int32_t group = format.group_size;
  LMI_CHECK(format.rounding != RowRounding::kLlmInt8 || format.dtype == DType::kI8,
            "rows of LLM.int8 are for int8 weights, not ", dtype_name(format.dtype));
  switch (format.dtype) {
    case DType::kF32:
    case DType::kBF16:
    case DType::kF16:
    case DType::kI8:
      LMI_CHECK(group == 0, dtype_name(format.dtype), " weights have no groups, got ", group);
      LMI_CHECK(format.dtype != DType::kI8 || num_inputs <= kMaxInt8Inputs,
                "int8 weights have at most ", kMaxInt8Inputs, " inputs, not ", num_inputs);
      return;
    case DType::kI4:
      LMI_CHECK(group == 32 || group == 64 || group == 128,
                "the group size of int4 weights is 32, 64 or 128, not ", group);
      return;
    case DType::kE4M3:
    case DType::kE5M2:
    case DType::kNF4:
    case DType::kFP4: {
      const int32_t inputs = float_codes(format.dtype).num_inputs;
      const int32_t sum_inputs = has_code_planes(format.dtype) ? kBlockSumInputs : 0;
      LMI_CHECK(group == sum_inputs, "the group size of ", dtype_name(format.dtype), " is ",
                sum_inputs, ", not ", group);
      LMI_CHECK(num_inputs % inputs == 0, dtype_name(format.dtype), " has scales for ", inputs,
                " inputs, which ", num_inputs, " aren't a multiple of");
      LMI_CHECK(num_inputs <= kMaxFloatCodeInputs, dtype_name(format.dtype),
                " weights have at most ", kMaxFloatCodeInputs, " inputs, not ", num_inputs);
      return;
    }
    default: {
      const BlockFormat blocks = block_format(format.dtype);
      LMI_CHECK(blocks.num_inputs != 0, "linear format ", dtype_name(format.dtype));
      LMI_CHECK(group == kBlockSumInputs, "the group size of blocks is ", kBlockSumInputs, ", not ",
                group);
      LMI_CHECK(num_inputs % blocks.num_inputs == 0, dtype_name(format.dtype), " has blocks of ",
                blocks.num_inputs, ", which ", num_inputs, " inputs aren't a multiple of");
    }
  }
}

bool pack_looked_at(const std::vector<LinearPart>& parts, int64_t num_inputs, bool gated,
                    LinearFormat format, void* target, int64_t first_panel, int64_t end_panel) {
  check_linear_format(format, num_inputs);
  check_parts(parts, num_inputs, gated, format);
  const int64_t stride = panel_bytes(format, num_inputs);
  PanelQuantizer quantizer(format, num_inputs);
  bool is_finite = true;
  for (int64_t panel = first_panel; panel < end_panel; ++panel) {
    const PanelRows rows = find_rows(parts, num_inputs, gated, panel);
    is_finite = is_finite && are_finite(rows, num_inputs);
    uint8_t* bytes = static_cast<uint8_t*>(target) + panel * stride;
    uint32_t* words = reinterpret_cast<uint32_t*>(bytes);
    if (format.dtype == DType::kBF16) {
      pack_panel<bf16_t>(rows, num_inputs, words);
    } else if (format.dtype == DType::kF32) {
      pack_panel<float>(rows, num_inputs, words);
    } else if (format.dtype == DType::kF16) {
      pack_halves(rows, num_inputs, bytes);
    } else if (has_float_codes(format.dtype)) {
      pack_float_codes(rows, format.dtype, num_inputs, bytes);
    } else if (is_of_blocks(format.dtype)) {
      pack_blocks(rows, format.dtype, num_inputs, bytes);
    } else {
      quantizer.pack(rows, bytes);
    }
  }
  return is_finite;
}

void pack_linear(const std::vector<LinearPart>& parts, int64_t num_inputs, bool gated,
                 LinearFormat format, void* target, int64_t first_panel, int64_t end_panel) {
  pack_looked_at(parts, num_inputs, gated, format, target, first_panel, end_panel);
}

namespace {

// A panel's input of an output; of blocks, in `blocks` [inputs][16].
float unpack_one(const LinearFormat& format, const uint8_t* panel, const float* blocks,
                 int64_t lane, int64_t input) {
  switch (format.dtype) {
    case DType::kF32:
      return reinterpret_cast<const float*>(panel)[input * kPanelOutputs + lane];
    case DType::kBF16:
      return bf16_to_float(reinterpret_cast<const bf16_t*>(
          panel)[(input / 2 * kPanelOutputs + lane) * 2 + input % 2]);
    case DType::kF16:
      return f16_to_float(reinterpret_cast<const uint16_t*>(panel)[input * kPanelOutputs + lane]);
    case DType::kI8:
    case DType::kI4:
      return unpack_quantized(format, panel, lane, input);
    case DType::kE4M3:
    case DType::kE5M2:
    case DType::kNF4:
    case DType::kFP4:
      return unpack_float_code(format.dtype, panel, lane, input);
    default:
      return blocks[input * kPanelOutputs + lane];
  }
}

}  // namespace

void unpack_linear(const PackedLinear& weight, float* target) {
  const LinearFormat format{weight.dtype, weight.group_size};
  const int64_t stride = panel_bytes(format, weight.num_inputs);
  const int64_t num_parts = weight.gated ? 2 : 1;
  const int64_t part_outputs = weight.num_outputs / num_parts;
  const Kernels& table = kernels(default_instruction_set());
  const bool has_blocks = is_of_blocks(weight.dtype);
  std::vector<float> blocks(has_blocks ? weight.num_inputs * kPanelOutputs : 0);
  int64_t unpacked = -1;
  for (int64_t output = 0; output < weight.num_outputs; ++output) {
    const int64_t row = output % part_outputs;
    const int64_t panel = row / kPanelOutputs * num_parts + output / part_outputs;
    const uint8_t* data = static_cast<const uint8_t*>(weight.data) + panel * stride;
    if (has_blocks && panel != unpacked) {
      table.block_packing.unpack(weight.dtype, data, weight.num_inputs, blocks.data());
      unpacked = panel;
    }
    for (int64_t input = 0; input < weight.num_inputs; ++input) {
      target[output * weight.num_inputs + input] =
          unpack_one(format, data, blocks.data(), row % kPanelOutputs, input);
    }
  }
}

}  // namespace lmi::cpu
