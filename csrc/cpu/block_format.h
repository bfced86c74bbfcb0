// GGUF's types of quantised weights: neighbouring inputs in blocks, each with its scales.
//
// Packed, a block of 16 outputs keeps the order that its bytes have in the file, but every unit of
// them (a word of 4 bytes, a half of 2 or a byte) is followed by the other 15 outputs' before the
// next one comes: so a panel has exactly the file's bytes, and each unit is a vector. A row reads
// these best from the first to the last, which Q6_K's own order doesn't let it: its bits are put
// into another one first (Q6_K::reorder in isa/block_types.inc), in as many bytes.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace lmi::cpu {

// A stretch of a block in units of one size.
struct BlockField {
  int32_t num_bytes;
  int32_t unit_bytes;
};
constexpr int kMaxBlockFields = 5;

struct BlockFormat {
  int32_t num_inputs = 0;  // of a block; 0: the type isn't of blocks
  int32_t num_bytes = 0;
  BlockField fields[kMaxBlockFields] = {};
};

// Inputs whose codes a row of inputs has one sum of, for every type of blocks.
constexpr int32_t kBlockSumInputs = 16;

// Format: the structs of the blocks in ggml's source.
constexpr BlockFormat block_format(DType dtype) {
  switch (dtype) {
    case DType::kQ4_0:
    case DType::kIQ4_NL:  // scale, codes
      return {32, 18, {{2, 2}, {16, 4}}};
    case DType::kQ4_1:  // scale, minimum, codes
      return {32, 20, {{4, 2}, {16, 4}}};
    case DType::kQ5_0:  // scale, high bits, codes
      return {32, 22, {{2, 2}, {20, 4}}};
    case DType::kQ5_1:
      return {32, 24, {{4, 2}, {20, 4}}};
    case DType::kQ8_0:
      return {32, 34, {{2, 2}, {32, 4}}};
    case DType::kMXFP4:
      return {32, 17, {{1, 1}, {16, 4}}};
    case DType::kQ2_K:  // scales and minima, codes, scale of scales, of minima
      return {256, 84, {{80, 4}, {4, 2}}};
    case DType::kQ3_K:  // high bits, codes, scales, scale of scales
      return {256, 110, {{108, 4}, {2, 2}}};
    case DType::kQ4_K:  // scale of scales, of minima, scales and minima, codes
      return {256, 144, {{4, 2}, {140, 4}}};
    case DType::kQ5_K:  // the same with high bits before the codes
      return {256, 176, {{4, 2}, {172, 4}}};
    case DType::kQ6_K:  // reordered: scale of scales; of every 64 inputs scales and codes
      return {256, 210, {{2, 2}, {208, 4}}};
    case DType::kIQ4_XS:  // scale of scales, scales' high and low bits, codes
      return {256, 136, {{4, 2}, {132, 4}}};
    default:
      return {};
  }
}

// GGUF's types of blocks between rows and panels.
struct BlockPacking {
  // 16 rows, null for zeros.
  void (*pack)(DType dtype, const uint8_t* const* rows, int64_t num_inputs,
               uint8_t* panel) = nullptr;
  // To [num_inputs][16].
  void (*unpack)(DType dtype, const uint8_t* panel, int64_t num_inputs, float* target) = nullptr;
};

constexpr bool is_of_blocks(DType dtype) { return block_format(dtype).num_inputs != 0; }

}  // namespace lmi::cpu
