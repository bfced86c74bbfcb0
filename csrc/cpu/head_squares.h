// The operands of a norm over all heads of a row, some of which other ranks may have.
#pragma once

#include <cstdint>

namespace lmi::cpu {

// y = the mean of the squares of each of num_groups vectors, side by side in a row.
struct HeadSquaresArgs {
  const float* x = nullptr;
  int64_t x_stride = 0;
  float* y = nullptr;       // [rows, num_groups]
  int64_t num_columns = 0;  // of a vector
  int64_t num_groups = 0;
  int64_t num_rows = 0;
};

// y = y / sqrt(mean + eps) * weight, in place, of num_columns from first_column on; the mean is
// that of parts' squares, added up one after the other, so that its bits don't depend on how many
// parts they are in.
constexpr int32_t kMaxSquareParts = 64;  // as many as there are ranks
struct NormBySquaresArgs {
  const float* parts[kMaxSquareParts] = {};  // of each row num_squares, part_stride apart
  int32_t num_parts = 0;
  int64_t num_squares = 0;
  int64_t part_stride = 0;
  const float* weight = nullptr;  // [num_columns]
  float eps = 0.0f;
  float* y = nullptr;
  int64_t y_stride = 0;
  int64_t first_column = 0;
  int64_t num_columns = 0;
  int64_t num_rows = 0;
};

}  // namespace lmi::cpu
