// Dense products before there are operands.
#pragma once

#include "cuda/lmi_cuda.h"

namespace lmi::cuda {

// Asks cuBLASLt, which must be open, for algorithms of such a product, and tries which is fastest
// on the operands, whose content is of no account; the result is written.
int32_t prepare_linear_dense(const LmiLinearDense& args);

}  // namespace lmi::cuda
