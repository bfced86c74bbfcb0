// Dense products before there are operands.
#pragma once

#include "cuda/lmi_cuda.h"

namespace lmi::cuda {

// Asks cuBLASLt, which must be open, for the algorithm of such a product.
int32_t prepare_linear_dense(const LmiLinearDense& args);

}  // namespace lmi::cuda
