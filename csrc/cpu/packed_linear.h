// Weight matrices in the kernels' own order, the rows that quantised ones are multiplied with, and
// packing.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "common/dtype.h"
#include "cpu/block_format.h"
#include "cpu/float_codes.h"

namespace lmi::cpu {

// A weight matrix [num_outputs, num_inputs] in the kernel's own order. Panels of 16 outputs:
//   fp32: [inputs][16]
//   bf16: [inputs/2][16][2]
//   int8: 16 fp32 scales, then [inputs/4][16][4] codes c of a byte: weight = scale (c - 128),
//         one scale per output; quantising gives c in 1 .. 255, checkpoints may hold 0
//   int4: per group of 32, 64 or 128 inputs: 16 fp16 scales, 16 fp16 zero points, then
//         [group/8][16][4] bytes, whose lower halves are the codes c of inputs 0 .. 3 and whose
//         upper halves those of inputs 4 .. 7: weight = scale (c - zero), c in 0 .. 15. Symmetric
//         weights have the zero point 8; others any that fp16 holds.
//   fp16: [inputs][16]
//   GGUF's types of blocks: their bytes in the order of block_format.h
//   codes of floats: in the order of float_codes.h
// So every step along K of the first four is 64 bytes. Outputs are padded with zeros to a multiple
// of 16, inputs to a whole step, of int4 to a whole group. A gated weight holds gate and up panels
// alternating (gate 0, up 0, gate 1, up 1, ...), num_outputs counting both; each of the two is
// padded on its own. Packed weights are kept on disk: whoever changes this order, or what
// quantising gives, counts kPackedLayoutVersion up.
constexpr int64_t kPanelOutputs = 16;
constexpr int32_t kPackedLayoutVersion = 3;
constexpr int64_t kMaxInt8Inputs = 65536;  // so that 32 bits hold every sum of products

// How the inputs of quantised weights are rounded, each row on its own.
enum class RowRounding : uint8_t {
  kInt8,      // to 255 steps of one scale
  kOutliers,  // the same, but a row's few largest inputs to 16 bits of that scale
  kNone,      // not at all: products are those of the unpacked weight in fp32
  kLlmInt8,   // int8 weights: those below kLlmInt8Threshold as kInt8, the others not at all
};

// Format: LLM.int8 (arXiv 2208.07339), of which a row's inputs alone decide here.
constexpr float kLlmInt8Threshold = 6.0f;

struct LinearFormat {
  DType dtype = DType::kBF16;
  int32_t group_size = 0;  // int4: inputs per scale; blocks, NF4, FP4: kBlockSumInputs; others 0
  RowRounding rounding = RowRounding::kOutliers;  // changes nothing of what is packed
};

// Where the rows of a bf16 matrix lie while it isn't packed yet, in bf16.
struct StoredRows {
  const uint8_t* const* rows = nullptr;  // [panels][16]; null: padding
  uint32_t is_packed = 0;                // the matrix is in its place; atomic, once it is shared
};

struct PackedLinear {
  DType dtype = DType::kBF16;
  int64_t num_outputs = 0;
  int64_t num_inputs = 0;
  bool gated = false;
  const void* data = nullptr;  // 64-byte aligned; memory belongs to LinearWeight
  int32_t group_size = 0;
  RowRounding rounding = RowRounding::kOutliers;  // of what a quantised weight is multiplied with
  int64_t num_experts = 1;                        // matrices of this shape, one after the other
  int64_t expert_bytes = 0;                       // of each, or of the only one
  // [num_inputs] which of a row's inputs each of the matrix's is; null: the same one. Rows become
  // quantised ones in this order.
  const int32_t* input_order = nullptr;
  // Of a matrix that is packed while it is used, which gives the same results before and after.
  const StoredRows* stored = nullptr;

  // Not of the activations' own type, which only fp32 and bf16 are. Inlined unoptimised, too: what
  // instruction sets share would be a symbol of one of them.
  [[gnu::always_inline]] bool is_quantized() const {
    return dtype != DType::kF32 && dtype != DType::kBF16;
  }
  [[gnu::always_inline]] bool takes_quantized_rows() const {
    const bool has_floats = has_float_codes(dtype) && !has_code_planes(dtype);
    const bool has_integers = is_quantized() && dtype != DType::kF16 && !has_floats;
    return has_integers && rounding != RowRounding::kNone;
  }
  // Quantised rows for the other weight are right for this one.
  bool takes_rows_of(const PackedLinear& other) const {
    return takes_quantized_rows() && other.takes_quantized_rows() && rounding == other.rounding &&
           group_size == other.group_size && has_order_of(other);
  }
  bool has_order_of(const PackedLinear& other) const {
    if (input_order == nullptr || other.input_order == nullptr) {
      return input_order == other.input_order;
    }
    return num_inputs == other.num_inputs &&
           std::equal(input_order, input_order + num_inputs, other.input_order);
  }
};

// A row of inputs for int8 and int4 weights: x = scale q, where q has 8 bits, or of outliers 16:
// q = low + 256 high, both of int8. A row's scale is the largest magnitude over 127, without
// outliers. With them, t is the least of largest / 8, largest / 16, .. largest / 512 that at most
// max_outliers() magnitudes reach, if there is one, and the scale the largest magnitude below 2 t,
// or largest / 256 if that is more, over 127: so a row has no more outliers than it takes to come
// within a factor of 2 of the finest scale. Nothing but maxima and counts decides, which no order
// changes, and sums of products are whole numbers: so every device and shape finds the same bits.
//   int8 low[inputs, padded with zeros to a multiple of 128]
//   float scale; NaN if an input isn't finite
//   int32 number of inputs whose high isn't 0
//   int32 sums of low: over each group of a weight that has groups, or one over the row
//   int32 column << 8 | high as a byte, of each input whose high isn't 0, columns ascending
// Of kLlmInt8, the scale is the largest magnitude below the threshold over 127, inputs from the
// threshold on have the code 0, and each is listed as its int32 column and itself in fp32.
// padded to a multiple of 64 bytes. The sums take the codes' offsets out again: sum (c - z) q =
// sum c q - z sum q, where c is unsigned and q signed as the instructions want them.
[[gnu::always_inline]] constexpr int64_t max_outliers(int64_t num_inputs) {
  return num_inputs / 32;
}
[[gnu::always_inline]] constexpr int64_t quantized_scale_offset(int64_t num_inputs) {
  return (num_inputs + 127) / 128 * 128;
}
[[gnu::always_inline]] constexpr int64_t quantized_sums_offset(int64_t num_inputs) {
  return quantized_scale_offset(num_inputs) + 8;
}
[[gnu::always_inline]] constexpr int64_t outliers_offset(int64_t num_inputs, int32_t group_size) {
  const int64_t num_sums = group_size == 0 ? 1 : (num_inputs + group_size - 1) / group_size;
  return quantized_sums_offset(num_inputs) + 4 * num_sums;
}
[[gnu::always_inline]] constexpr int64_t quantized_row_bytes(int64_t num_inputs, int32_t group_size,
                                                             RowRounding rounding) {
  const bool lists_all = rounding == RowRounding::kLlmInt8;
  const int64_t list_bytes = lists_all ? 8 * num_inputs : 4 * max_outliers(num_inputs);
  return (outliers_offset(num_inputs, group_size) + list_bytes + 63) / 64 * 64;
}

// One source of a packed matrix: row-major [num_outputs, num_inputs] in dtype fp32, bf16, fp16, or
// codes of floats, which are multiples of scales [num_outputs, num_scales]: one for a row, or one
// for every num_inputs of float_codes(). Or in the packed format itself, int8 or int4: bytes, each
// a code, which are kept, with scales and, of int4, zero points [num_outputs, num_scales] for each
// of its groups; or GGUF's blocks, whose type is the packed format, too.
struct LinearPart {
  const void* data = nullptr;
  DType dtype = DType::kBF16;
  int64_t num_outputs = 0;
  const float* scales = nullptr;
  int64_t num_scales = 0;
  const float* zeros = nullptr;

  bool is_coded() const { return dtype == DType::kI8 || dtype == DType::kI4; }
  int64_t row_bytes(int64_t num_inputs) const {
    const BlockFormat blocks = block_format(dtype);
    if (blocks.num_inputs != 0) return num_inputs / blocks.num_inputs * blocks.num_bytes;
    if (has_float_codes(dtype)) return float_codes(dtype).code_bytes(num_inputs);
    return num_inputs * (is_coded() ? 1 : dtype_size(dtype));
  }
};
constexpr int64_t kScaleInputs = 128;

// Panels and bytes of the packed form, and the packing itself of panels [first_panel, end_panel),
// so that callers can split it over threads. target is 64-byte aligned memory of that many bytes;
// padding is written too. A gated matrix has two parts, gate and up, of equal num_outputs. int8 and
// int4 are quantised on the way, unless they are the parts' own format.
int64_t num_linear_panels(int64_t num_outputs, bool gated);
int64_t packed_linear_bytes(LinearFormat format, int64_t num_outputs, int64_t num_inputs,
                            bool gated);
void check_linear_format(LinearFormat format, int64_t num_inputs);  // throws Error
const char* row_rounding_name(RowRounding rounding);                // "int8", "outliers" ...
RowRounding parse_row_rounding(const std::string& name);            // throws Error
void pack_linear(const std::vector<LinearPart>& parts, int64_t num_inputs, bool gated,
                 LinearFormat format, void* target, int64_t first_panel, int64_t end_panel);
// The row-major float matrix back (tests).
void unpack_linear(const PackedLinear& weight, float* target);

}  // namespace lmi::cpu
