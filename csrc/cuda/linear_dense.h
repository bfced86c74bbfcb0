// Dense products before there are operands.
#pragma once

#include "cuda/lmi_cuda.h"

namespace lmi::cuda {

// Asks cuBLASLt, which must be open, for algorithms of such a product, and tries which is fastest
// on the operands, whose content is of no account; the result is written.
int32_t prepare_linear_dense(const LmiLinearDense& args);

// Products of codes, too: of dtype LMI_E4M3, x and weight of num_inputs bytes a row, and of LMI_I8,
// where y gets int32. No bias.

// Sets is_there to false where cuBLASLt has no algorithm for such a product.
int32_t find_dense_algorithm(const LmiLinearDense& args, bool* is_there);
// Of a product that has one.
int32_t multiply_dense(const LmiLinearDense& args, void* stream);

}  // namespace lmi::cuda
