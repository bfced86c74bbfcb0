// The operands of products over slices of inputs, and of their sums.
#pragma once

#include <cstdint>

namespace lmi::cpu {

struct LinearArgs;
struct QuantizeRowsArgs;

// y = the sum of parts, + bias, + y if add_to_y. Neighbours are added first, then neighbouring
// sums, and so on, so that whoever adds up 2^n parts from a multiple of 2^n on finds a sum of this
// tree.
constexpr int32_t kMaxSumParts = 64;
struct SumArgs {
  const float* parts[kMaxSumParts] = {};  // [rows, num_columns] each
  int32_t num_parts = 0;                  // 0: zeros
  const float* bias = nullptr;            // [num_columns] or null
  bool add_to_y = false;
  float* y = nullptr;
  int64_t num_columns = 0;
  int64_t num_rows = 0;
};

// Columns of each row as rows of their own, quantised for a slice each.
struct QuantizeSlicesArgs {
  const QuantizeRowsArgs* slices = nullptr;  // that leave num_rows open
  int32_t num_slices = 0;
  int64_t num_rows = 0;
};

// sum.y = the sum of what the slices' products give, as SumArgs says: each pair of neighbours has a
// part of the sum, to which the second one adds. A chunk has its outputs of all slices and sums.
struct SummedLinearArgs {
  const LinearArgs* slices = nullptr;  // of equal outputs, that leave num_rows open
  int32_t num_slices = 0;
  SumArgs sum;  // of one part that is y: nothing is left to be done
  int64_t num_rows = 0;
};

}  // namespace lmi::cpu
